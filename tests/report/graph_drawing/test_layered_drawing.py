from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.report.graph_drawing.layered_drawing import Scheme, arrange
from outcore.report.graph_drawing.routes import WireRoute


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, tuple[WireRoute, ...]]:
    boxes = draw(st.integers(1, 14))
    routes = []
    for source in [None, None, *range(boxes)]:
        first = 0 if source is None else source + 1
        later = st.lists(st.integers(first, boxes - 1), max_size=3, unique=True) if first < boxes else st.just([])
        targets, leaves = tuple(draw(later)), draw(st.booleans())
        if targets or leaves:
            routes.append(WireRoute(source, targets, leaves))
    return boxes, tuple(routes)


def rows_of(scheme: Scheme) -> dict[int, int]:
    return {knot: i for i, row in enumerate(scheme.rows) for knot in row}


@given(networks())
@settings(deadline=None)
def test_every_route_leads_down_row_by_row_to_each_of_its_readers(
    network: tuple[int, tuple[WireRoute, ...]],
) -> None:
    boxes, routes = network
    scheme = arrange(boxes, routes)
    rows = rows_of(scheme)
    assert sorted(rows) == list(range(len(scheme.knots)))
    assert all(rows[step.lower] == rows[step.upper] + 1 for step in scheme.steps)
    for i, route in enumerate(routes):
        steps = {step.lower: step.upper for step in scheme.steps if step.route == i}
        ends = {k for k in steps if scheme.knots[k].role != "lane"}
        out = {k for k, knot in enumerate(scheme.knots) if knot.role == "out" and knot.index == i}
        assert ends == {*route.targets, *out}
        for end in ends:
            while end in steps:
                end = steps[end]
            knot = scheme.knots[end]
            assert (knot.role, knot.index) == (("in", i) if route.source is None else ("box", route.source))


@given(networks())
@settings(deadline=None)
def test_columns_hold_every_knot_once_and_come_after_those_left_of_them(
    network: tuple[int, tuple[WireRoute, ...]],
) -> None:
    scheme = arrange(*network)
    number = {knot: i for i, column in enumerate(scheme.columns) for knot in column}
    assert sum(map(len, scheme.columns)) == len(number) == len(scheme.knots)
    assert all(number[a] < number[b] for row in scheme.rows for a, b in pairwise(row))
    rows = rows_of(scheme)
    assert all(rows[b] == rows[a] + 1 for column in scheme.columns for a, b in pairwise(column))


@given(networks())
@settings(deadline=None)
def test_the_same_network_is_arranged_the_same_way(network: tuple[int, tuple[WireRoute, ...]]) -> None:
    again = arrange.__wrapped__(*network)
    assert again == arrange.__wrapped__(*network)


def test_nested_skips_do_not_cross_and_run_right_of_the_straight_main_line() -> None:
    # encoders 0, 1, 2, bottom 3, decoders 4, 5, 6
    routes = [WireRoute(None, (0,)), *(WireRoute(i, (i + 1, 6 - i)) for i in range(3))]
    routes += [*(WireRoute(i, (i + 1,)) for i in (3, 4, 5)), WireRoute(6, (), leaves=True)]
    scheme = arrange(7, tuple(routes))
    assert scheme.crossings == 0
    main = next(column for column in scheme.columns if 0 in column)
    assert [k for k in main if scheme.knots[k].role == "box"] == list(range(7))
    assert all(row[0] in main for row in scheme.rows)
    lanes = [scheme.knots[k].index for k in scheme.rows[rows_of(scheme)[3]][1:]]
    assert lanes == [2 + 1, 1 + 1, 0 + 1][: len(lanes)]  # the longest skip is outermost; route 1 + i starts at box i


def test_readers_of_one_value_share_its_lane() -> None:
    dense = tuple(WireRoute(i, tuple(range(i + 1, 9))) for i in range(8))
    lanes = [knot for knot in arrange(9, dense).knots if knot.role == "lane"]
    assert len(lanes) == sum(8 - i - 1 for i in range(8))


def test_where_many_branches_meet_none_is_straight() -> None:
    routes = [WireRoute(0, (1, 2, 3)), *(WireRoute(i, (4,)) for i in (1, 2, 3))]
    columns = arrange(5, tuple(routes)).columns
    assert (0,) in columns
    assert (4,) in columns


def test_a_given_order_at_the_top_is_kept() -> None:
    routes = (WireRoute(None, (0,)), WireRoute(None, (1,)))
    scheme = arrange(2, routes, top=(1, 0))
    assert [scheme.knots[k].index for k in scheme.rows[0]] == [1, 0]


def test_what_needs_no_input_stands_where_it_is_used() -> None:
    # a chain 0..4, and a constant made by 5 and 6 that 7 adds to its end
    routes = [
        WireRoute(None, (0,)),
        *(WireRoute(i, (i + 1,)) for i in range(4)),
        WireRoute(4, (7,)),
        WireRoute(5, (6,)),
        WireRoute(6, (7,)),
    ]
    rows = rows_of(arrange(8, tuple(routes)))
    assert rows[6] == rows[7] - 1
    assert rows[5] == rows[7] - 2
