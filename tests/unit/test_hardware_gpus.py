"""The table of GPUs: units, names, and numbers that others derived from the same datasheets."""

import pytest

import cbserve
from cbserve.core.errors import InvalidRequestError
from cbserve.hardware.gpus import GPUS, gpu


@pytest.mark.parametrize("device", GPUS.values(), ids=lambda device: device.name)
def test_units(device):
    assert 1e13 < device.flops < 1e16
    assert 1e10 <= device.memory_bytes < 1e12
    assert 1e11 < device.memory_bytes_s < 1e13
    assert 1e10 < device.host_link_bytes_s < 1e12
    assert device.nvlink_bytes_s == 0 or device.host_link_bytes_s < device.nvlink_bytes_s < 1e12
    assert device.source
    # What CUDA reports is a whole number of MiB and near the name's; its source is told.
    assert device.memory_is_reported == (device.memory_bytes % 1e9 != 0) == ("memory" in device.source)
    assert not device.memory_is_reported or device.memory_bytes % 2**16 == 0


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("a100-40", 40), ("a100-80", 80), ("a100-80-pcie", 80), ("h100", 80), ("rtx4090", 24)]
)
def test_memory_is_near_what_the_name_says(name, gigabytes):
    assert gigabytes <= gpu(name).memory_bytes / 1e9 < 1.074 * gigabytes  # up to as many GiB


@pytest.mark.parametrize(
    ("name", "full", "ridge"),
    [
        # FLOPs a byte at the ridge of the roofline, from published tables
        ("t4", "T4", 217),
        ("l4", "L4", 403),
        ("a10g", "A10G", 117),
        ("a100-40", "A100-40 SXM", 201),
        ("a100-80", "A100-80 SXM", 153),
        ("a100-80-pcie", "A100-80 PCIe", 161),
        ("l40s", "L40S", 419),
        ("h100", "H100 SXM", 295),
        ("h100-pcie", "H100 PCIe", 378),
        ("h200", "H200 SXM", 206),
        ("b200", "B200", 281),
        ("gb200", "GB200", 312),
        ("rtx4090", "RTX 4090", 164),
    ],
)
def test_short_and_full_names_in_any_case(name, full, ridge):
    device = gpu(name)
    assert device is gpu(name.upper()) is gpu(full) is gpu(full.lower()) is GPUS[full] is gpu(device)
    assert device.flops / device.memory_bytes_s == pytest.approx(ridge, abs=0.7)


def test_an_unknown_name_is_answered_with_all_names():
    with pytest.raises(InvalidRequestError, match="'a100'") as error:
        gpu("a100")
    for name in ("t4", "a100-40", "a100-80", "a100-80-pcie", "h100-pcie", "gb200", "rtx4090"):
        assert name in str(error.value)


def test_public_names():
    assert cbserve.GPUS is GPUS
    assert cbserve.gpu is gpu
    assert cbserve.model_shape("llama-3.1-8b").num_layers == 32
    assert cbserve.Roofline.on("h100", "llama-3.1-8b").flops == 989.4e12
    assert cbserve.kv_capacity("llama-3.1-8b", "h100").num_blocks > 0
