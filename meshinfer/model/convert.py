"""Runs what may crash or take much memory, in a process of its own: `python -P convert.py TASK …`.

A script that imports nothing of this program, so that it starts by its path alone. It works in the current
directory with plain ASCII names, since the converter's C++ opens files by narrow strings, which cannot name
all paths on Windows. Its result is one line of JSON on standard output; a failure is one line on standard
error and exit code 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

FAILURE = "meshinfer-convert: "


def convert_gguf() -> dict[str, object]:
    """`model.gguf` → `openvino_model.xml/.bin`, with the `wanted` frequencies of positions; encodes `texts`.

    Both stand in a JSON object on standard input, with the `unscaled` frequencies that the converter knows.
    """
    import openvino_genai

    request = json.load(sys.stdin)
    pipeline = openvino_genai.LLMPipeline("model.gguf", "CPU", enable_save_ov_model=True)
    tokenizer = pipeline.get_tokenizer()
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in request["texts"]]
    ids = [tokens.input_ids.data.ravel().tolist() for tokens in encoded]
    del pipeline, tokenizer, encoded  # Their files must be closed to be replaced, on Windows.
    set_frequencies(request["unscaled"], request["wanted"])
    return {"ids": ids}


def set_frequencies(unscaled: list[float], wanted: list[float]) -> None:
    """Puts `wanted`, as f32, in the place of the one constant that is `unscaled`, which may be f16."""
    import numpy
    import openvino

    core = openvino.Core()
    core.set_property({"ENABLE_MMAP": False})
    model = core.read_model("openvino_model.xml")
    constants = [
        node
        for node in model.get_ops()
        if node.get_type_name() == "Constant"
        and list(node.shape) == [1, len(unscaled), 1]
        and numpy.allclose(node.data.ravel().astype(numpy.float64), unscaled, rtol=1e-3, atol=1e-6)
    ]
    if len(constants) != 1:
        raise ValueError(f"the model has {len(constants)} tables of positions where one is expected")
    found = constants[0]
    values = numpy.array(wanted, numpy.float32).reshape(found.shape)
    if found.get_element_type() == openvino.Type.f32 and numpy.allclose(
        found.data, values, rtol=1e-6, atol=0
    ):
        return
    old = found.output(0)
    readers = [reader.get_node() for reader in old.get_target_inputs()]
    if len(readers) == 1 and readers[0].get_type_name() == "Convert":
        old = readers[0].output(0)
    fresh = openvino.opset13.constant(values, dtype=numpy.float32)
    for reader in old.get_target_inputs():
        reader.replace_source_output(fresh.output(0))
    openvino.save_model(model, "exact.xml", compress_to_fp16=False)
    for suffix in (".bin", ".xml"):
        os.replace(f"exact{suffix}", f"openvino_model{suffix}")  # noqa: PTH105


def convert_checkpoint() -> dict[str, object]:
    """The Hugging Face checkpoint in `checkpoint/` → an OpenVINO model in `model/`, not compressed."""
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(
        "checkpoint",
        export=True,
        compile=False,
        load_in_8bit=False,
        local_files_only=True,
        trust_remote_code=False,
    )
    model.save_pretrained("model")
    return {}


def compress(bits: str, source: str) -> dict[str, object]:
    """The OpenVINO model at `source` → `openvino_model.xml/.bin` with weights of 8 or 4 bits."""
    import nncf
    import openvino

    mode, options = {
        "int8": (nncf.CompressWeightsMode.INT8_ASYM, {}),
        "int4": (nncf.CompressWeightsMode.INT4_SYM, {"group_size": 64, "ratio": 1.0}),
    }[bits]
    model = openvino.Core().read_model(source)
    types = {
        node.get_element_type().get_type_name()
        for node in model.get_ops()
        if node.get_type_name() == "Constant" and len(node.shape) > 1
    }
    if compressed := types & {"u4", "i4", "u8", "i8", "nf4"}:
        raise ValueError(f"its weights are {min(compressed)} already; pull it without --quantize")
    model = nncf.compress_weights(model, mode=mode, **options)
    openvino.save_model(model, "openvino_model.xml", compress_to_fp16=False)
    return {}


TASKS: dict[str, Callable[..., dict[str, object]]] = {
    "gguf": convert_gguf,
    "checkpoint": convert_checkpoint,
    "compress": compress,
}


def main() -> int:
    try:
        result = TASKS[sys.argv[1]](*sys.argv[2:])
    except Exception as error:  # Whatever these libraries raise becomes one sentence in the parent.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(FAILURE + (lines[-1] if lines else type(error).__name__)[:500], file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(result))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
