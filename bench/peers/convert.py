"""Makes the model of engines that cannot read a GGUF file. Run with an interpreter that has transformers, torch and gguf:

python convert.py folder       MODEL.gguf FOLDER    # a Hugging Face folder in float32, for vLLM and for the other two
python convert.py ctranslate2  MODEL.gguf FOLDER    # int8; needs ctranslate2 as well
python convert.py onnxruntime  MODEL.gguf FOLDER    # int4; needs onnxruntime-genai, onnx and onnx_ir as well
"""

import os
import subprocess
import sys
import tempfile

QUANTISED_MARKS = ("quantization_config", "quantization_method", "is_quantized")


def to_folder(gguf, folder):
    """The dequantised weights and the tokenizer as transformers saves them."""
    import torch
    import transformers

    where, file = os.path.split(os.path.abspath(gguf))
    model = transformers.AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, gguf_file=file)
    model.__dict__["hf_quantizer"] = (
        None  # it is marked as quantised, and would refuse to be saved, although its weights are plain
    )
    for owner in (model, model.config):
        for mark in QUANTISED_MARKS:
            if mark in vars(owner):
                delattr(owner, mark)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def to_ctranslate2(gguf, folder):
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as plain:
        to_folder(gguf, plain)
        TransformersConverter(plain, low_cpu_mem_usage=True).convert(folder, quantization="int8", force=True)


def to_onnxruntime(gguf, folder):
    with tempfile.TemporaryDirectory() as plain:
        to_folder(gguf, plain)
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        places = ["-m", plain, "-i", plain, "-o", folder, "-c", os.path.join(plain, "cache")]
        options = ["-p", "int4", "-e", "cpu", "--extra_options", "int4_accuracy_level=4"]
        subprocess.run([*builder, *places, *options], check=True)


KINDS = {"folder": to_folder, "ctranslate2": to_ctranslate2, "onnxruntime": to_onnxruntime}


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    KINDS[sys.argv[1]](sys.argv[2], sys.argv[3])


if __name__ == "__main__":
    main()
