"""Random networks cut into stages: chains with long skips, several users of one value, and values without gradient."""

import random

from hypothesis import strategies as st

from outcore.program import Edge, Program, Stage, Stages, compile_program


@st.composite
def stages(draw: st.DrawFn, *, least: int = 1, most: int = 6) -> Stages:
    depth = draw(st.integers(least, most))
    return random_stages(random.Random(draw(st.integers(0, 2**32))), depth)


def random_stages(rng: random.Random, depth: int) -> Stages:
    parts = []
    for _ in range(depth):
        forward_s = rng.choice([0.5, 1.0, 1.5, 3.0])
        saved, weights = rng.randint(0, 100), rng.choice([0, 8, 40])
        parts.append(
            Stage(
                (),
                forward_s,
                forward_s * rng.choice([1.0, 2.0, 3.0]),
                saved,
                rng.randint(0, 10),
                weights,
                weights,
                2 * weights,
            )
        )
    edges = [
        Edge(
            f"x{s}",
            s,
            tuple(sorted({s + 1, *rng.sample(range(s + 1, depth), rng.randint(0, min(2, depth - s - 1)))})),
            4,
            True,
        )
        for s in range(depth - 1)
    ]
    for number in range(rng.randint(0, 3) if depth > 1 else 0):
        source = rng.randrange(depth - 1)
        later = range(source + 1, depth)
        targets = tuple(sorted(rng.sample(later, rng.randint(1, len(later)))))
        edges.append(Edge(f"skip{number}", source, targets, rng.randint(1, 9), rng.random() < 0.6))
    return Stages(tuple(parts), tuple(edges))


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
