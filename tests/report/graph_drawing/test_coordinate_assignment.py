import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from outcore.report.graph_drawing.coordinate_assignment import nearest, settle

numbers = st.floats(-100, 100)
chains = st.lists(st.tuples(numbers, st.floats(0.1, 10), st.floats(0, 30)), min_size=1, max_size=12)


@given(chains)
def test_a_chain_of_columns_is_placed_by_least_squares(chain: list[tuple[float, float, float]]) -> None:
    want, weight, gaps = (list(column) for column in zip(*chain, strict=True))
    apart = [{i - 1: gaps[i]} if i else {} for i in range(len(want))]
    x = nearest(want, weight, apart)
    # Without its distances a chain only has to be in order: isotonic regression.
    before = np.cumsum([0, *gaps[1:]])
    order = np.arange(len(want))
    expected = IsotonicRegression().fit(order, want - before, weight).predict(order) + before
    np.testing.assert_allclose(x, expected, atol=1e-6)


@given(st.integers(2, 9), st.randoms(use_true_random=False))
def test_distances_are_kept(size: int, random) -> None:  # type: ignore[no-untyped-def]
    apart = [{j: random.uniform(1, 40) for j in range(i) if random.random() < 0.5} for i in range(size)]
    want, weight = (
        [random.uniform(-50, 50) for _ in range(size)],
        [random.uniform(0.01, 5) for _ in range(size)],
    )
    for x in (
        nearest(want, weight, apart),
        settle(weight, apart, [[(1.0, i // 2, 3.0)] for i in range(size)]),
    ):
        assert all(x[i] - x[j] >= space - 1e-6 for i, spaces in enumerate(apart) for j, space in spaces.items())


def test_a_light_lane_gives_way_to_a_heavy_column() -> None:
    x = nearest([0.0, 0.0], [10.0, 0.001], [{}, {0: 50.0}])
    assert abs(x[0]) < 0.01
    assert abs(x[1] - 50) < 0.01
