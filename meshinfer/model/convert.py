"""Runs what may crash or take much memory, in a process of its own: `python -P convert.py TASK …`.

A script that imports nothing of this program, so that it starts by its path alone. It works in the current
directory with plain ASCII names, since the converter's C++ opens files by narrow strings, which cannot name
all paths on Windows. Its result is one line of JSON on standard output; a failure is one line on standard
error and exit code 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

FAILURE = "meshinfer-convert: "


def convert_gguf() -> dict[str, object]:
    """`model.gguf` → `openvino_model.xml/.bin`; encodes the texts in a JSON list on standard input."""
    import openvino_genai

    texts = json.load(sys.stdin)
    pipeline = openvino_genai.LLMPipeline("model.gguf", "CPU", enable_save_ov_model=True)
    tokenizer = pipeline.get_tokenizer()
    ids = [tokenizer.encode(text, add_special_tokens=False).input_ids.data.ravel().tolist() for text in texts]
    return {"ids": ids}


def convert_checkpoint(source: str) -> dict[str, object]:
    """A Hugging Face checkpoint at `source` → an OpenVINO model in `model/`, its weights as they are."""
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(
        source, export=True, compile=False, load_in_8bit=False, local_files_only=True,
        trust_remote_code=False, use_safetensors=True,
    )  # fmt: skip
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
    model = nncf.compress_weights(openvino.Core().read_model(source), mode=mode, **options)
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
