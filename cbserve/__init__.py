"""cbserve: a course on LLM serving whose claims are experiments on a real engine.

The public names below are loaded when they are first used, so that `import cbserve` costs
nothing: neither torch nor numpy is imported before something needs it.
"""

from __future__ import annotations  # an older Python must get as far as the message in __main__

from importlib import import_module

__version__ = "0.1.0"

#: Public name -> the module that defines it.
PUBLIC = {
    "Request": "cbserve.core.request",
    "SamplingParams": "cbserve.core.request",
    "FinishReason": "cbserve.core.request",
    "StaticBatching": "cbserve.core.batching",
    "ContinuousBatching": "cbserve.core.batching",
    "Policy": "cbserve.core.policies",
    "FCFS": "cbserve.core.policies",
    "Priority": "cbserve.core.policies",
    "Scheduler": "cbserve.core.scheduler",
    "BlockPool": "cbserve.core.blocks",
    "KVCacheManager": "cbserve.core.kv_cache",
    "Trace": "cbserve.core.trace",
    "Finished": "cbserve.core.trace",
    "Preempted": "cbserve.core.trace",
    "Summary": "cbserve.core.summary",
    "summarize": "cbserve.core.summary",
    "sequence_metrics": "cbserve.core.metrics",
    "slot_utilisation": "cbserve.core.metrics",
    "occupancy": "cbserve.core.metrics",
    "prefix_hit_rate": "cbserve.core.metrics",
    "tail_waste": "cbserve.core.metrics",
    "static_steps": "cbserve.core.bounds",
    "static_utilisation": "cbserve.core.bounds",
    "continuous_steps_bound": "cbserve.core.bounds",
    "step_speedup_bound": "cbserve.core.bounds",
    "harmonic": "cbserve.core.bounds",
    "azure": "cbserve.workloads.lengths",
    "exponential": "cbserve.workloads.lengths",
    "lognormal": "cbserve.workloads.lengths",
    "fixed": "cbserve.workloads.lengths",
    "uniform": "cbserve.workloads.lengths",
    "pareto": "cbserve.workloads.lengths",
    "empirical": "cbserve.workloads.lengths",
    "all_at_once": "cbserve.workloads.arrivals",
    "poisson": "cbserve.workloads.arrivals",
    "gamma": "cbserve.workloads.arrivals",
    "on_off": "cbserve.workloads.arrivals",
    "ClosedLoop": "cbserve.workloads.arrivals",
    "Job": "cbserve.workloads.workload",
    "Workload": "cbserve.workloads.workload",
    "synthesize": "cbserve.workloads.synthetic",
    "azure_twin": "cbserve.workloads.synthetic",
    "shared_prefix": "cbserve.workloads.sessions",
    "multi_turn": "cbserve.workloads.sessions",
    "read_trace": "cbserve.workloads.readers",
    "read_azure": "cbserve.workloads.readers",
    "read_mooncake": "cbserve.workloads.readers",
    "read_requests": "cbserve.workloads.measured",
    "MODELS": "cbserve.hardware.models",
    "GPUS": "cbserve.hardware.gpus",
    "gpu": "cbserve.hardware.gpus",
    "model_shape": "cbserve.hardware.models",
    "Roofline": "cbserve.hardware.roofline",
    "kv_capacity": "cbserve.hardware.capacity",
    "serve": "cbserve.serving",
    "simulate": "cbserve.simulation",
    "Simulation": "cbserve.simulation",
    "Calibration": "cbserve.calibration",
    "load_calibration": "cbserve.calibration",
    "calibrate": "cbserve.calibrating.machine",
    "fit_run": "cbserve.calibrating.run_fit",
    "Twin": "cbserve.twin",
    "chat_workload": "cbserve.twin",
    "page_state": "cbserve.core.pages",
    "paged_attention": "cbserve.kernels.paged_attention",
    "StepTimes": "cbserve.replay",
    "measure_step_times": "cbserve.replay",
    "Engine": "cbserve.engine",
    "LLM": "cbserve.llm",
    "timeline": "cbserve.viz",
    "page_map": "cbserve.viz",
    "bars": "cbserve.viz",
    "lines": "cbserve.viz",
    "histogram": "cbserve.viz",
    "table": "cbserve.viz",
    "timeline_explorer": "cbserve.explorers",
    "page_map_explorer": "cbserve.explorers",
    "pareto_explorer": "cbserve.explorers",
    "Setting": "cbserve.explorers",
    "long_prefill_scene": "cbserve.explorers",
    "cold_start_scene": "cbserve.explorers",
    "check": "cbserve.course",
    "hint": "cbserve.course",
    "solved": "cbserve.course",
    "progress": "cbserve.course",
    "claim": "cbserve.course",
    "ledger": "cbserve.course",
    "doctor": "cbserve.course.doctor",
    "CBServeError": "cbserve.errors",
}

__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(PUBLIC[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
