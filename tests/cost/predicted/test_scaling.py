import pytest

from outcore.cost.predicted.scaling import Scaling, SizePoint, ladder
from outcore.errors import OutcoreError


def line(size: int) -> SizePoint:
    """Ten bytes and two seconds a sample over a base of a hundred bytes and one second."""
    return SizePoint(size, 1.0 + 2.0 * size, 0.9 + 1.8 * size, 1.1 + 2.2 * size, 100 + 10 * size, size)


@pytest.mark.parametrize("capacity", [110, 115, 133, 1000, 5000])
def test_the_largest_size_that_fits_is_found_by_going_on(capacity: int) -> None:
    found = ladder("batch", (1, 2, 4), line, capacity)
    exact = (capacity - 100) // 10
    assert found.largest == pytest.approx(exact, rel=1 / 64, abs=0)
    assert found.largest <= exact
    assert [p.size for p in found.points] == sorted({p.size for p in found.points})


def test_nothing_fits_is_zero() -> None:
    assert ladder("batch", (1, 2), line, 50).largest == 0


def test_sizes_in_between_lie_on_the_line_and_others_are_refused() -> None:
    found = ladder("batch", (1, 8), line, 10**6, most=8)
    assert found.at(3).step_s == pytest.approx(7.0)
    assert found.at(3).peak_bytes == 130
    assert found.at(3).per_second == pytest.approx(3 / 7)
    with pytest.raises(OutcoreError, match="outside of the sizes"):
        found.at(9)


def test_a_change_of_slope_is_a_knee_and_a_line_has_none() -> None:
    def flat_then_steep(size: int) -> SizePoint:
        return SizePoint(size, max(4.0, float(size)), 0.0, 99.0, size, size)

    found = ladder("batch", (1, 2, 4, 8, 16), flat_then_steep, 16, most=16)
    assert found.knees("step_s") == [4]
    assert found.knees("peak_bytes") == []
    assert ladder("batch", (1, 2, 4, 8), line, 10**6, most=8).knees() == []


def test_a_size_that_the_model_refuses_is_kept_with_its_reason() -> None:
    def even(size: int) -> SizePoint:
        if size % 2:
            raise OutcoreError(f"{size} is odd\nmore")
        return line(size)

    found = ladder("image", (3, 4), even, 10**6, most=4)
    assert found.failures == {3: "3 is odd"}
    assert [p.size for p in found.points] == [4]
    assert found.to_json()["failures"] == {"3": "3 is odd"}


def test_the_best_of_those_that_fit_has_the_most_samples_per_second() -> None:
    points = tuple(line(size) for size in (1, 4, 16))
    assert Scaling("batch", points, 145, 4, {}).best() == points[1]
    assert Scaling("batch", points, 10, 0, {}).best() is None
