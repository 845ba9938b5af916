"""A calibration that was measured badly says so, and a missed target is told from a machine that has changed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from test_calibration import CPU_TIME, ONE

from cbserve.calibrating.advice import doubts, verdict
from cbserve.calibrating.measured_run import Agreement

GOOD = replace(ONE, environment={"timer": "perf_counter", "threads": 2, "cores": 2, "load_average": 2.1})
POINT = GOOD.points[0]


def with_error(name: str, error: float):
    return {"errors": {**GOOD.errors, name: error}}


def with_load(load: float, cores: int = 2):
    return {"environment": {**GOOD.environment, "load_average": load, "cores": cores}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        (with_error("eff_memory", 0.12), ""),  # 24 % of it
        (with_error("eff_memory", 0.13), "eff_memory is 0.500 ± 0.130, so other values fit nearly as well"),
        (with_error("eff_compute", math.nan), "eff_compute is 0.700 ± nan"),
        (with_error("overhead_s", 0.019), ""),  # the shortest step takes 200 ms
        (with_error("overhead_s", 0.021), "overhead_s is 20.000 ± 21.000 ms"),
        (with_error("overlap", 0.2), ""),  # of 0.0, and of a whole
        (with_error("overlap", 0.3), "overlap is 0.000 ± 0.300"),
        ({"points": (replace(POINT, fitted_s=0.219),)}, ""),
        ({"points": (replace(POINT, fitted_s=0.17),)}, "half of the steps are more than 15% off the fit"),
        (with_load(4.1), "others used the machine (load average 4.1 on 2 cores)"),
        (with_load(4.1, cores=8), ""),
        ({"environment": {"load_average": 4.1}}, ""),  # of an older version, which did not say of how many cores
    ],
)
def test_wide_bars_a_bad_fit_and_a_busy_machine_are_told(change, words):
    said = doubts(replace(GOOD, **change))
    assert words in said and bool(said) == bool(words)
    assert not said or "cbserve calibrate --cpu-time" in said and "quiet" in said


def test_the_reasons_stand_in_one_sentence():
    said = doubts(replace(GOOD, **with_load(4.1), **with_error("eff_memory", 0.3)))
    assert said.count("Take these constants with care") == 1 and "eff_memory" in said and "load average" in said


def test_cpu_time_does_not_count_others_and_is_not_its_own_cure():
    assert doubts(replace(CPU_TIME, environment={**CPU_TIME.environment, "cores": 2, "load_average": 4.1})) == ""
    said = doubts(replace(CPU_TIME, **with_error("eff_memory", 0.3)))
    assert "quiet" in said and "--cpu-time" not in said


KEPT, MISSED = Agreement("makespan", 10.0, 10.5, 0.1), Agreement("mean TPOT", 50.0, 40.0, 0.1, "ms")


@pytest.mark.parametrize(
    ("rows", "before", "after", "words", "cure"),
    [
        ([KEPT], 0.02, -0.03, "Every target is kept.", ""),
        ([KEPT], 0.30, 0.0, "although a step took +30% before the run and +0% after it", ""),
        ([KEPT, MISSED], 0.02, -0.03, "Missed: mean TPOT. The machine was as fast", "--repeat 3"),
        ([KEPT, MISSED], 0.30, 0.15, "was slower than when it was calibrated", "with --calibrate, when"),
        ([KEPT, MISSED], -0.34, -0.52, "was faster than when it was calibrated", "quiet, or with --cpu-time"),
        ([KEPT, MISSED], 0.30, -0.26, "The speed of the machine changed", "quiet, or with --cpu-time"),
        ([KEPT, MISSED], 0.0, 0.4, "a step took +0% before the run and +40% after it", "quiet, or with --cpu-time"),
    ],
)
def test_a_missed_target_is_told_from_a_machine_that_changed(rows, before, after, words, cure):
    said = verdict(rows, before, after)
    assert words in said and cure in said


def test_by_cpu_time_the_cures_are_of_cpu_time():
    for after in (0.25, -0.26):
        said = verdict([MISSED], 0.3, after, is_cpu_time=True)
        assert "when the machine is quiet" in said and "--cpu-time" not in said
