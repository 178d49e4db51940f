import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from fedsilo.core.seeding import derive_seed, generator, seed_generators

_KEYS = st.lists(st.one_of(st.integers(-9, 99), st.text("ab0:", max_size=3)), max_size=3).map(tuple)


@budget(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), first=_KEYS, second=_KEYS)
def test_differing_keys_give_differing_seeds_and_equal_keys_equal_ones(
    seed: int, first: tuple[int | str, ...], second: tuple[int | str, ...]
) -> None:
    equal = derive_seed(seed, *first) == derive_seed(seed, *second)
    assert equal == (first == second)


def test_a_text_with_a_slash_cannot_pass_for_two_parts_of_a_key() -> None:
    assert derive_seed(0, "a/str:b") != derive_seed(0, "a", "b")


def test_a_seed_stays_the_same_over_versions() -> None:
    # SHA-256 of '42/str:batches/int:3', first 8 bytes, halved: written down, never computed again
    assert derive_seed(42, "batches", 3) == 1945857535087680461


def test_generators_of_one_key_draw_the_same_whatever_was_drawn_between() -> None:
    first = torch.randn(5, generator=generator(1, "site", 2))
    torch.randn(100)
    again = torch.randn(5, generator=generator(1, "site", 2))
    other = torch.randn(5, generator=generator(1, "site", 3))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_seeded_block_repeats_its_draws_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    with seed_generators(1, "dropout"):
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    with seed_generators(1, "dropout"):
        assert torch.equal(torch.rand(4), first)
    with seed_generators(1, "weights"):
        assert not torch.equal(torch.rand(4), first)
