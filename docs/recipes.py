"""Writes docs/recipes.md: what the planner predicts for configs/recipes. `make recipes`; a test says when it is out of date."""

from __future__ import annotations

from pathlib import Path

from shoal import config, units
from shoal.launcher.planning import deciding
from shoal.launcher.planning.problem import problem_of
from shoal.planner.costs import churn
from shoal.planner.strategy.plan import Plan

HERE = Path(__file__).parent
ROOT = HERE.parent
FOLDER = Path("configs/recipes")
PAGE = HERE / "recipes.md"

TITLES = {
    "lora-8B": "LoRA of an 8B on four 12 GB cards",
    "dpo-8B": "DPO of an 8B on four 12 GB cards",
    "qlora-70B": "QLoRA of a 70B on eight 24 GB cards in three places",
    "full-1.3B": "Full fine-tuning of a 1.3B on spot T4s",
    "continued-3B": "Continued pretraining of a 3B on six 24 GB cards",
}
WHY = {
    "lora-8B": """\
16 GB of frozen weights in bfloat16 fit on no card. Two stages of two replicas do, and a home may switch off: its replica goes on.
Averaging is that of the adapters alone.""",
    "dpo-8B": """\
Preference pairs instead of chats, on the same cards: each pair is two rows of tokens, which pass the stages with adapters and without, so a
microbatch of one pair takes two and a half times as long as one of one chat. What the cards hold hardly grows: no graph is kept of the
reference's rows.""",
    "qlora-70B": """\
Frozen weights take 4.5 bits each: a quarter of the model is on a card, and every stage has two. A host needs room for its stage in
bfloat16 while it encodes it: 35 GB.""",
    "full-1.3B": """\
A T4 has no bfloat16 (`train.dtype` stays float32, at an eighth of its float16 rate), and 16 bytes for each weight fill it. With moments in
8 bits a stage leaves room for kept activations. Spot machines disappear: every stage has two replicas, a checkpoint of every 20 steps
lies on three machines. `shoal forecast` with `configs/traces/aws-g4dn-spot.csv` says what that costs over a day.""",
    "continued-3B": """\
All weights are trained, so every step averages the whole gradient: int8 halves twice what travels, and large steps make it rare.
`data.weights` mixes the sources. A low, slowly warmed-up learning rate keeps what the model knows.""",
}
INTRODUCTION = """\
# Recipes

After this page you can plan, rehearse and start five kinds of training on other people's models. Every figure of a plan is predicted by
`shoal plan`; `make recipes` writes this page, and a test compares it with the planner.

| recipe | step | tokens/s | memory of a card | a day | a million tokens |
|---|---|---|---|---|---|
{rows}

Each recipe is a configuration and a file of machines. Give `model.path` your model's directory; the one in the file has the model's
shape alone, enough for `shoal plan` and `shoal forecast`. Measure your machines and lines with `shoal probe`, correct the machines'
file, then:

```
cp configs/recipes/lora-8B.toml my.toml
shoal plan my.toml --cluster machines.toml --stages 2 --out plan.json
shoal run my.toml --plan plan.json --cluster machines.toml device.executor=emulated device.emulated_s=0 device.kind=auto run.steps=3
shoal run my.toml --plan plan.json --here 1 network.host=ITS_ADDRESS model.path=./Llama-8B data.tokenizer=./Llama-8B
shoal eval runs/lora-8B held-out.jsonl
shoal export runs/lora-8B --adapter out
```

The second command rehearses the plan on one machine, with real messages on modelled lines; [below](#rehearsed) is what
that gave. The third starts the first peer; the others join as in the [tutorial](tutorial.md). Chats are described in
[Training data](data.md), adapters in [Adapters](variants/adapters.md). Without `--stages` the planner takes the shortest step, which may
leave a stage without a replica: then its loss sends everybody back to the newest checkpoint.
"""


def page() -> str:
    plans = {name: planned(name) for name in TITLES}
    rows = "\n".join(row(name, plan) for name, (_, plan, _) in plans.items())
    text = [INTRODUCTION.format(rows=rows)]
    for name, (tree, plan, losses) in plans.items():
        text += section(name, tree, plan, losses)
    rehearsed = "\n".join(rehearsal(name, plan) for name, (_, plan, _) in plans.items())
    return "\n".join([*text, CLOSING.format(rehearsed=rehearsed)])


CLOSING = """\
## Rehearsed

Message by message in the simulator: `shoal forecast RECIPE --cluster MACHINES --stages S --hours H --seeds 1 --exact`. The seconds of a
step are those that so many whole steps leave open, without the minute in which machines join.

| recipe | planned | simulated | whole steps in hours |
|---|---|---|---|
{rehearsed}

What is planned is computed with this page; what is simulated was measured once, with the plans of then, which were within 3 % of it.

By real processes on one machine: `python benchmarks/recipes.py`, with tensors and lines a sixteenth as large. On two quiet cores `lora-8B`,
at full size, took 49.2 s a step of the 43.1 s planned: one replica of a stage computed 17 of the 32 microbatches, the other 15. With
the cores busy with other work (load 15) it took 59.7 s, and `full-1.3B` (load 16, tensors a 64th) 35.7 s of 24.4 s. The others have not
been measured so.

## A small one that runs here

`python benchmarks/tuned.py` needs two cores and some minutes, and nothing from elsewhere. It trains a tokenizer and pretrains a Llama of
2.3 million parameters on the text of Python's library, by four peers; then it tunes the model with LoRA on a task that is made up, by four
peers of which one is killed now and then. The same tuning by TRL in one process stands beside it (`pip install trl`; a loop over PEFT's
model where it is missing).

| of 320 questions that were not trained on | right | loss |
|---|---|---|
| the pretrained model | 16.9 % | 8.452 |
| tuned by the swarm, six of its peers killed | 99.4 % | 1.772 |
| tuned by TRL in one process | 99.4 % | 1.766 |

That was with adapters alone (`--also ''`); every sample was counted once ([results](results.md#tuned)). With `--large`, eleven million
parameters and 600 steps of tuning, adapters alone were too little: 89.7 % by the swarm, 88.8 % by TRL. A few minutes of pretraining leave
a head that is not finished, and frozen it tells the answers apart badly. With embeddings, head and norms trained beside the adapters
(`tune.also`), which is now the benchmark's default:

| of 320 questions, eleven million parameters | right | loss |
|---|---|---|
| the pretrained model | 5.0 % | 10.113 |
| tuned by the swarm, six of its peers killed, six others joined | 100 % | 0.004 |
| tuned by TRL in one process, the same parts beside its adapters | 99.4 % | 0.012 |

Two bookings were redone, none was lost or counted twice ([results](results.md#tunedlarge)).
"""

# By recipe: the seconds of a step in the simulator, and the whole steps in its hours.
REHEARSED = {
    "lora-8B": ("46.3 to 48.5 s", "21 in 0.3"),
    "dpo-8B": ("94 to 110 s", "6 in 0.2"),
    "qlora-70B": ("68 to 80 s", "6 in 0.15"),
    "full-1.3B": ("27.5 to 28.7 s", "23 in 0.2"),
    "continued-3B": ("92 to 98 s", "14 in 0.4"),
}


def planned(name: str) -> tuple[config.Config, Plan, str]:
    """With as many stages as the recipe names, which is what leaves each a replica; and what losses of machines cost, in words."""
    tree = config.load(
        ROOT / FOLDER / f"{name}.toml", [f"model.path={ROOT / FOLDER / 'shapes' / name.partition('-')[2]}"]
    )
    problem = problem_of(tree, str(ROOT / FOLDER / f"{name}-machines.toml"))
    plan = deciding.decide(tree, problem, tree.run.stages)
    if not any(device.losses_per_h for device in problem.cluster.devices):
        return tree, plan, ""
    cost = churn.expected(plan, problem.cluster, tree.run.heartbeat_timeout_s, tree.checkpoint.every)
    return tree, plan, f"{cost.losses_per_h:.2g} losses of machines an hour cost {cost.share:.1%} of the time."


def row(name: str, plan: Plan) -> str:
    predicted = plan.predicted
    assert predicted is not None
    memory = units.size(max(stage.memory_bytes for stage in plan.stages))
    anchor = TITLES[name].lower().replace(" ", "-").replace(".", "")
    million = predicted.price_per_day / (predicted.tokens_per_s * 86400) * 1e6
    return (
        f"| [{name}](#{anchor}) | {units.duration(predicted.step_s)} | {predicted.tokens_per_s:,.0f} | {memory} |"
        f" {predicted.price_per_day:,.2f} | {million:.2g} |"
    )


def rehearsal(name: str, plan: Plan) -> str:
    """A row of what the plan says beside what the simulator gave."""
    assert plan.predicted is not None
    return f"| {name} | {plan.predicted.step_s:.3g} s | {' | '.join(REHEARSED[name])} |"


def section(name: str, tree: config.Config, plan: Plan, losses: str) -> list[str]:
    predicted = plan.predicted
    assert predicted is not None
    lines = [f"## {TITLES[name]}", "", WHY[name], "", f"`{FOLDER}/{name}.toml`, `{FOLDER}/{name}-machines.toml`", ""]
    lines += ["| stage | blocks | peers | memory | a microbatch |", "|---|---|---|---|---|"]
    for number, stage in enumerate(plan.stages):
        how = units.size(stage.memory_bytes) + ", checkpointing" * stage.checkpointing
        peers = ", ".join(stage.peers)
        lines.append(
            f"| {number} | {stage.first}-{stage.end - 1} | {peers} | {how} | {units.duration(stage.microbatch_s)} |"
        )
    tokens = config.tokens_per_step(tree)
    parts = (
        f"{units.duration(predicted.microbatches_s)} microbatches, {units.duration(predicted.averaging_s)} averaging"
    )
    lines += [
        "",
        f"A step of {tokens:,} tokens takes {units.duration(predicted.step_s)}: {parts}. The busiest peer sends"
        f" {units.size(predicted.sent_bytes)} in it. {losses}".rstrip(),
        "",
    ]
    return lines


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
