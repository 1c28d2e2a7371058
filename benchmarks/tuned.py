"""A small model pretrained by Shoal, then chat-tuned by a swarm under churn; beside it the same tuning by PEFT in one process.

    python benchmarks/tuned.py [--large] [--pretrain 150] [--tune STEPS] [--rate 2e-3] [--also embeddings,head,norms] [--kills 6]
        [--keep DIRECTORY]

A Llama of 2.3 million parameters (`--large`: 11 million), with a tokenizer that is trained here, learns the text of Python's own
library: four peers, two stages. The task that it is then tuned on with LoRA is made up: which of three letters comes last in an
alphabet of our own. Embeddings, head and norms are trained beside the adapters, unless `--also` says otherwise: a base of some minutes
has a head that is not finished, and with it frozen the larger model had 90 % after 600 steps, of the swarm and of TRL alike. The same
number of steps is done by four peers of which one is killed now and then and another joins, and by TRL's SFTTrainer where it is
installed, else by a loop over PEFT's model. The swarm's adapters are exported and loaded by PEFT. Accuracy: of questions that were not
trained on, the likeliest letter of the alphabet is right; one of 12 is by chance. The value is the swarm's accuracy, its target 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from report import at_least, parse, report

ROOT = Path(__file__).resolve().parents[1]
LETTERS, SHOWN, HELD_OUT = "eicajlfbhdgk", 3, 320  # in the made-up order
TEXT_END = "<|text|>"
TEMPLATE = (  # of tokens that the model has seen: those that it has not get the same output, and LoRA leaves the head as it is
    "{% for message in messages %}{% if message.role == 'assistant' %}assistant:{% generation %}{{ message.content + '\n' }}"
    "{% endgeneration %}{% else %}{{ message.role + ':' + message.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
RANK, ALPHA, RATE, BATCH, SEED = 16, 32, 2e-3, 32, 3
MODULES = {  # of tune.also, as PEFT's modules_to_save names them in a Llama
    "embeddings": ("embed_tokens",),
    "head": ("lm_head",),
    "norms": ("input_layernorm", "post_attention_layernorm", "norm"),
}
VOCABULARY = 1024
SMALL = "model.hidden_size=160 model.layers=6 model.heads=4 model.kv_heads=4 model.intermediate_size=448".split()
LARGE = "model.hidden_size=320 model.layers=8 model.heads=8 model.kv_heads=8 model.intermediate_size=896".split()
PRETRAIN = f"""
model.vocab_size={VOCABULARY} data.sequence=128 train.batch=32 train.microbatch=4 train.learning_rate=2e-3 data.source=python
""".split()
TUNE = f"""
tune.method=lora tune.rank={RANK} tune.alpha={ALPHA} data.source=jsonl data.format=chat data.path=chats.jsonl data.sequence=24
train.batch={BATCH} train.microbatch=8 train.weight_decay=0 train.schedule=linear train.final_ratio=0
train.betas=[0.9,0.999] train.warmup=10 run.seed={SEED}
""".split()
SWARM = "run.peers=4 run.stages=2 network.discovery=gossip data.tokenizer=tokenizer checkpoint.every=50".split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="11 million parameters instead of 2.3")
    parser.add_argument("--pretrain", type=int, default=150, help="steps")
    parser.add_argument("--tune", type=int, metavar="STEPS", help="default: 300, of the larger model 600")
    parser.add_argument("--rate", type=float, default=RATE, help=f"of learning, of both tunings; default: {RATE:g}")
    parser.add_argument("--also", default=",".join(MODULES), help="trained beside the adapters; default: all three")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--keep", metavar="DIRECTORY", help="a directory for the runs, which then stay there")
    args = parse(parser)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(args.keep or folder)
        place.mkdir(parents=True, exist_ok=True)
        also = tuple(filter(None, args.also.split(",")))
        tuning = Tuning(args.tune or (600 if args.large else 300), args.rate, args.kills, also)
        figures = measured(place, LARGE if args.large else SMALL, args.pretrain, tuning)
    report(
        "tuned.large" if args.large else "tuned",
        figures["swarm_percent"],
        "% right of held-out questions",
        at_least(95),
        figures,
        args.record,
    )
    return 0


class Tuning(NamedTuple):
    """Of the swarm and of one process alike."""

    steps: int = 300
    rate: float = RATE  # of learning
    kills: int = 6  # of the swarm's peers
    also: tuple[str, ...] = tuple(MODULES)  # trained beside the adapters


def measured(place: Path, model: list[str], pretrain: int, tuning: Tuning) -> dict[str, Any]:
    """All of it, below that directory. `model`: the settings that say how large it is."""
    a_tokenizer(place / "tokenizer")
    (place / "settings.toml").write_text("")  # all settings are arguments
    questions = some_questions()
    lines = (json.dumps({"messages": chat(question)}) + "\n" for question in questions[HELD_OUT:])
    (place / "chats.jsonl").write_text("".join(lines))
    held_out = questions[:HELD_OUT]

    began = time.monotonic()
    shoal(place, "run", "settings.toml", *model, *PRETRAIN, *SWARM, "run.name=base", f"run.steps={pretrain}")
    base, minutes = place / f"runs/base/checkpoints/step-{pretrain}", (time.monotonic() - began) / 60
    before = answers(loaded(base), place, held_out)

    account = tuned_by_swarm(place, base, tuning)
    shoal(place, "export", "runs/tuned", "--adapter", "adapter")
    swarm = answers(loaded(base, place / "adapter"), place, held_out)
    trainer, alone = tuned_alone(place, base, questions[HELD_OUT:], tuning)
    one = answers(alone, place, held_out)
    return {
        "before_percent": before[0],
        "swarm_percent": swarm[0],
        "one_process_percent": one[0],
        "held_out_losses": [before[1], swarm[1], one[1]],
        "one_process": trainer,
        "pretraining_minutes": round(minutes, 1),
        "pretraining_loss": account_of(place, "base")["losses"][-1],
        "killed": account["killed"],
        "joined": account["joined"],
        "redone": account["redone"],
        "lost": account["lost"],
        "counted_twice": account["counted_twice"],
        "steps": [pretrain, tuning.steps],
        "learning_rate": tuning.rate,
        "also": list(tuning.also),
    }


# ---------------------------------------------------------------------------------------------------------------- task


def some_questions() -> list[tuple[str, ...]]:
    """All, in an order drawn from a seed: the first HELD_OUT are not trained on."""
    every = list(permutations(LETTERS, SHOWN))
    random.Random(SEED).shuffle(every)
    return every


def right_of(question: tuple[str, ...]) -> str:
    return max(question, key=LETTERS.index)


def chat(question: tuple[str, ...]) -> list[dict[str, str]]:
    text = f"{','.join(question)}"
    return [{"role": "user", "content": text}, {"role": "assistant", "content": right_of(question)}]


def a_tokenizer(folder: Path) -> None:
    """Byte-level BPE of the text that the model is trained on."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    library = Path(sysconfig.get_paths()["stdlib"])
    words = ByteLevelBPETokenizer()
    files = sorted(str(path) for path in library.glob("*.py"))
    words.train(files, vocab_size=VOCABULARY, special_tokens=[TEXT_END], show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, eos_token=TEXT_END, pad_token=TEXT_END)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def loaded(base: Path, adapter: Path | None = None) -> Any:
    """As every other program loads it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    return model if adapter is None else PeftModel.from_pretrained(model, adapter)


def answers(model: Any, place: Path, questions: list[tuple[str, ...]]) -> tuple[float, float]:
    """Percent of questions of which the likeliest letter is right, and the mean loss of the right letter among all tokens."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "tokenizer")
    ids = {letter: tokenizer.encode(letter) for letter in LETTERS}
    assert all(len(one) == 1 for one in ids.values()), "every letter is one token"
    prompts = [
        tokenizer.apply_chat_template(chat(one)[:1], add_generation_prompt=True, return_dict=False) for one in questions
    ]
    model.eval()
    right, losses = 0, 0.0
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(prompts), logits_to_keep=1).logits[:, -1].log_softmax(-1)
    for question, scores in zip(questions, logits, strict=True):
        right += max(LETTERS, key=lambda letter: float(scores[ids[letter][0]])) == right_of(question)
        losses -= float(scores[ids[right_of(question)][0]])
    return 100 * right / len(questions), round(losses / len(questions), 4)


# --------------------------------------------------------------------------------------------------------------- runs


def tuned_by_swarm(place: Path, base: Path, tuning: Tuning) -> dict[str, Any]:
    """Four peers, of which one is killed now and then and another joins. Returns the run's account."""
    (place / "kill.toml").write_text('[[act]]\nat = "0 s"\nkind = "kill"\nwho = "member"\n')
    words = (*TUNE, *SWARM, f"model.path={base}", "run.name=tuned")
    words += (f"run.steps={tuning.steps}", f"train.learning_rate={tuning.rate}", f"tune.also={json.dumps(tuning.also)}")
    run = started(place, "run", "settings.toml", *words)
    commits = place / "runs/tuned/commits.jsonl"
    for number in range(tuning.kills):
        while run.poll() is None and not (
            commits.exists() and commits.read_bytes().count(b"\n") > number * tuning.steps // (tuning.kills + 2)
        ):
            time.sleep(0.2)
        if run.poll() is None:
            shoal(place, "chaos", "runs/tuned", "--schedule", "kill.toml", "--seed", str(number))
    output, _ = run.communicate()
    if run.returncode:
        raise SystemExit(f"the swarm's tuning failed:\n{output[-3000:]}")
    account = account_of(place, "tuned")
    assert account["balanced"], account["reason"]
    return account


def tuned_alone(place: Path, base: Path, questions: list[tuple[str, ...]], tuning: Tuning) -> tuple[str, Any]:
    """By TRL's trainer, or by a loop over PEFT's model where TRL is not installed: its name, and the model."""
    from peft import LoraConfig

    lora = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear",
        modules_to_save=[module for part in tuning.also for module in MODULES[part]] or None,
        task_type="CAUSAL_LM",
    )
    try:
        import trl
    except ImportError:
        return "a loop over PEFT's model", by_hand(place, base, questions, tuning, lora)
    from datasets import Dataset
    from transformers import AutoTokenizer

    settings = trl.SFTConfig(
        output_dir=str(place / "trl"),
        max_steps=tuning.steps,
        per_device_train_batch_size=BATCH,
        learning_rate=tuning.rate,
        lr_scheduler_type="linear",
        warmup_steps=10,
        adam_beta2=0.999,
        assistant_only_loss=True,
        seed=SEED,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=tuning.steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model=loaded(base),
        args=settings,
        train_dataset=Dataset.from_list([{"messages": chat(one)} for one in questions]),
        processing_class=AutoTokenizer.from_pretrained(place / "tokenizer"),
        peft_config=lora,
    )
    trainer.train()
    return f"TRL {trl.__version__}", trainer.model


def by_hand(place: Path, base: Path, questions: list[tuple[str, ...]], tuning: Tuning, lora: Any) -> Any:
    import torch
    from peft import get_peft_model
    from transformers import AutoTokenizer

    torch.manual_seed(SEED)
    tokenizer, model = AutoTokenizer.from_pretrained(place / "tokenizer"), get_peft_model(loaded(base), lora)
    optimizer = torch.optim.AdamW(
        [one for one in model.parameters() if one.requires_grad], tuning.rate, weight_decay=0.0
    )
    order = random.Random(SEED + 1)
    for step in range(tuning.steps):
        share = min((step + 1) / 10, (tuning.steps - step) / max(1, tuning.steps - 10))
        optimizer.param_groups[0]["lr"] = tuning.rate * share
        encoded = tokenizer.apply_chat_template(
            [chat(one) for one in order.sample(questions, BATCH)],
            return_dict=True,
            return_tensors="pt",
            return_assistant_tokens_mask=True,
        )
        ids, counts = encoded["input_ids"], torch.as_tensor(encoded["assistant_masks"]) > 0
        loss = model(input_ids=ids, labels=ids.where(counts, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def account_of(place: Path, name: str) -> dict[str, Any]:
    account: dict[str, Any] = json.loads((place / f"runs/{name}/summary.json").read_bytes())
    return account


def shoal(place: Path, *words: str) -> None:
    process = started(place, *words)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"shoal {' '.join(words)}:\n{output[-3000:]}")


def started(place: Path, *words: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shoal.cli.main", *words]
    return subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


if __name__ == "__main__":
    sys.exit(main())
