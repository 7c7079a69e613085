"""Random networks cut into stages: chains with long skips, several users of one value, and values without gradient."""

import random

from hypothesis import strategies as st

from outcore.program import Edge, Program, Stage, Stages, compile_program


@st.composite
def stages(draw: st.DrawFn, *, least: int = 1, most: int = 6) -> Stages:
    depth = draw(st.integers(least, most))
    return random_stages(random.Random(draw(st.integers(0, 2**32))), depth)


def random_stages(rng: random.Random, depth: int) -> Stages:
    edges = [Edge(f"x{s}", s, random_targets(rng, s, depth, next_too=True), 4, True) for s in range(depth - 1)]
    for number in range(rng.randint(0, 3) if depth > 1 else 0):
        source = rng.randrange(depth - 1)
        targets = random_targets(rng, source, depth, next_too=False)
        edges.append(Edge(f"skip{number}", source, targets, rng.randint(1, 9), rng.random() < 0.6))
    return Stages(tuple(random_stage(rng) for _ in range(depth)), tuple(edges))


def random_stage(rng: random.Random) -> Stage:
    forward_s, weights = rng.choice([0.5, 1.0, 1.5, 3.0]), rng.choice([0, 8, 40])
    return Stage(
        calls=(),
        forward_s=forward_s,
        backward_s=forward_s * rng.choice([1.0, 2.0, 3.0]),
        saved_bytes=rng.randint(0, 100),
        workspace_bytes=rng.randint(0, 10),
        parameter_bytes=weights,
        gradient_bytes=weights,
        state_bytes=2 * weights,
    )


def random_targets(rng: random.Random, source: int, depth: int, *, next_too: bool) -> tuple[int, ...]:
    later = range(source + 1, depth)
    chosen = set(rng.sample(later, rng.randint(0 if next_too else 1, min(3, len(later)))))
    return tuple(sorted(chosen | {source + 1} if next_too else chosen))


@st.composite
def programs(draw: st.DrawFn, *, least: int = 1, trained: bool = False) -> tuple[Stages, Program]:
    network = draw(stages(least=least))
    if trained:
        rows = network.to_json()
        for row in rows["stages"]:
            row["gradient_bytes"] = 8
        network = Stages.from_json(rows)
    schedule = draw(st.sampled_from(["model-parallel", "gpipe", "1f1b", "gems-mast", "gems-master"]))
    batches = 2 if schedule == "gems-mast" else draw(st.integers(1, 4))
    program = compile_program(
        network,
        schedule,
        micro_batches=draw(st.integers(1, 4)),
        batches=batches,
        replicas=draw(st.integers(1, 3)),
        ahead=draw(st.integers(0, 3)),
    )
    return network, program
