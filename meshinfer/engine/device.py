"""The devices that OpenVINO offers on this PC, and how models are compiled for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import openvino as ov
import psutil

from meshinfer.errors import ConfigError
from meshinfer.values import Precision

SUPPORTED = ("CPU", "GPU")


@dataclass(frozen=True, slots=True)
class Device:
    """One device: OpenVINO's name for it, its full name, and its memory in bytes.

    `largest_bytes` is the largest single allocation that it allows.
    """

    name: str
    full_name: str
    memory_bytes: int
    largest_bytes: int


@functools.cache
def core() -> Any:
    """The process's one `openvino.Core`: plugins are loaded and caches kept once."""
    return ov.Core()


def devices() -> list[Device]:
    """The devices that a span can run on, CPU first."""
    found = []
    for name in core().available_devices:
        if name.startswith(SUPPORTED):
            memory, largest = _memory(name)
            found.append(Device(name, str(core().get_property(name, "FULL_DEVICE_NAME")), memory, largest))
    return sorted(found, key=lambda device: device.name)


def choose(setting: str) -> Device:
    """The device that the setting `[engine] device` names: "auto", "CPU", "GPU" or "GPU.1", any case.

    "auto" is the CPU: the path for GPUs is the same code, but could not be tried on a real one yet, so it is
    for those who ask for it. Raises `ConfigError` for what is not there or not supported.
    """
    wanted = setting.upper()
    found = devices()
    if wanted == "AUTO":
        wanted = "CPU"
    for device in found:
        if wanted in (device.name, device.name.partition(".")[0]):
            return device
    names = ", ".join(device.name for device in found)
    if wanted.startswith("NPU"):
        raise ConfigError(f"[engine] device = {setting!r}: NPUs are not supported yet; this PC has {names}")
    raise ConfigError(f"[engine] device = {setting!r}: no such device; this PC has {names}")


def compile_properties(device: str, precision: Precision, threads: int | None = None) -> dict[str, Any]:
    """OpenVINO's settings for a model on `device`; `threads` bounds the CPU's threads, None leaves them to
    OpenVINO.

    Whether threads are pinned to cores is left to OpenVINO. An asker and two owners on two cores, 16 sequences,
    ratio to GenAI in alternating runs: 0.90, 1.03, 0.95 pinned (its default on Linux), 0.91, 0.84, 0.87 not.
    Stages that compute at the same time on the same cores lose by it, but one PC runs one agent. KV precision is
    named even where it is the default, since some exporters write another into the model, and memory is budgeted
    for this one.
    """
    properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    if device == "CPU" and threads is not None:
        properties["INFERENCE_NUM_THREADS"] = threads
    if precision is Precision.EXACT:
        # All three, or the result still depends on the batch's shape: FACTS.
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    else:
        properties["KV_CACHE_PRECISION"] = "u8" if device == "CPU" else "f16"
    return properties


def _memory(name: str) -> tuple[int, int]:
    if name == "CPU":
        total = psutil.virtual_memory().total
        return total, total
    total = int(core().get_property(name, "GPU_DEVICE_TOTAL_MEM_SIZE"))
    largest = int(core().get_property(name, "GPU_DEVICE_MAX_ALLOC_MEM_SIZE"))
    return total, largest
