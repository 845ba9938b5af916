"""The table of GPUs: units, names, and numbers that others derived from the same datasheets."""

import pytest

import cbserve
from cbserve.core.errors import InvalidRequestError
from cbserve.hardware.gpus import GPUS, gpu
from cbserve.hardware.models import model_shape


@pytest.mark.parametrize("device", GPUS.values(), ids=lambda device: device.name)
def test_units(device):
    assert 1e13 < device.flops < 1e16
    assert 1e10 <= device.memory_bytes < 1e12
    assert 1e11 < device.memory_bytes_s < 1e13
    assert 1e10 < device.host_link_bytes_s < 1e12
    assert device.nvlink_bytes_s == 0 or device.host_link_bytes_s < device.nvlink_bytes_s < 1e12
    assert device.source


@pytest.mark.parametrize("device", GPUS.values(), ids=lambda device: device.name)
def test_every_memory_is_what_cuda_reports(device):
    """So that two GPUs compare: by its name an H100 of 80 GB would hold 8 % less than an A100 of as many."""
    assert device.memory_source
    # As many GiB as the name or the datasheet says, less what ECC and the driver take.
    nominal = {"T4": 16, "L4": 24, "A10G": 24, "L40S": 48, "H200 SXM": 141, "B200": 180, "GB200": 186, "RTX 4090": 24}
    gib = nominal.get(device.name) or (40 if "40" in device.name else 80)
    assert 0.91 < device.memory_bytes / 2**30 / gib < 1


def test_gpus_of_the_same_size_have_nearly_the_same_memory():
    sizes = [gpu(name).memory_bytes for name in ("a100-80", "a100-80-pcie", "h100", "h100-pcie")]
    assert max(sizes) / min(sizes) < 1.005


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


@pytest.mark.parametrize(
    ("look_up", "name", "meant"),
    [
        (gpu, "a100", "did you mean a100-40, a100-80 or a100-80-pcie?"),
        (gpu, "A100 80GB", "did you mean a100-80?"),
        (gpu, "h10o", "did you mean h100"),
        (gpu, "4090", "did you mean rtx4090?"),
        (gpu, "abacus", ""),
        (gpu, "", ""),
        (model_shape, "llama3", "did you mean llama-3.1-8b, llama-3.1-70b, llama-3.1-405b, llama-3-8b or llama-3-70b?"),
        (model_shape, "Llama-3.1-8B-Instruct", "did you mean llama-3.1-8b?"),
        (model_shape, "mistral", "did you mean mistral-7b?"),
        (model_shape, "gpt2", ""),
    ],
)
def test_names_that_were_nearly_right_are_asked_back(look_up, name, meant):
    with pytest.raises(InvalidRequestError, match="is not in the table") as error:
        look_up(name)
    assert meant in str(error.value) if meant else "did you mean" not in str(error.value)


def test_public_names():
    assert cbserve.GPUS is GPUS
    assert cbserve.gpu is gpu
    assert cbserve.model_shape("llama-3.1-8b").num_layers == 32
    assert cbserve.Roofline.on("h100", "llama-3.1-8b").flops == 989.4e12
    assert cbserve.kv_capacity("llama-3.1-8b", "h100").num_blocks > 0
