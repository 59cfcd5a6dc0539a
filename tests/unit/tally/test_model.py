"""The rules of the tally, against a slow reference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.core.errors import BadInput
from keyfold.tally.model import INT64_MAX, Addition, folded, newer

ADDITIONS = st.lists(st.builds(Addition, st.sampled_from("abc"), st.integers(-100, 100)))


@given(ADDITIONS, st.randoms())
def test_any_order_of_additions_folds_alike(additions: list[Addition], random: object) -> None:
    shuffled = list(additions)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    reference = {key: sum(a.add for a in additions if a.key == key) for key in {a.key for a in additions}}
    assert folded(additions) == folded(shuffled) == reference


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 8))),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 8)),
)
def test_a_version_is_new_only_above_everything_applied_before_it(
    versions: list[tuple[str, int]], applied: dict[str, int]
) -> None:
    verdicts = newer(versions, applied)
    for index, (key, version) in enumerate(versions):
        highest = max(
            [
                applied.get(key, 0),
                *(v for (k, v), new in zip(versions[:index], verdicts, strict=False) if new and k == key),
            ]
        )
        assert verdicts[index] == (version > highest)


def test_a_sum_beyond_64_bits_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="'a' do not fit"):
        folded([Addition("a", INT64_MAX), Addition("a", 1)])
