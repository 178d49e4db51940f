import numpy as np
import pytest
import torch

from fedsilo.models.maths.codebook import MovingAverages, split_most_used

BOOK = torch.tensor([[0.0, 0.0], [4.0, 4.0], [9.0, 9.0]])


def test_moving_averages_two_batches_give_the_values_by_hand() -> None:
    book = BOOK.clone()
    averages = MovingAverages([book], decay=0.5)
    tokens = torch.tensor([[[1.0, 1.0]], [[3.0, 1.0]], [[4.0, 6.0]]])
    averages.update(tokens, torch.tensor([[[0]], [[0]], [[1]]]))
    # N_0 = (1 + 2) / 2, m_0 = (0 + (4, 2)) / 2; N_1 = 1, m_1 = ((4, 4) + (4, 6)) / 2
    assert torch.allclose(book[0], torch.tensor([2.0, 1.0]) / 1.5)
    assert book[1].tolist() == [4.0, 5.0]
    averages.update(torch.tensor([[[2.0, 2.0]]]), torch.tensor([[[0]]]))
    # N_0 = (1.5 + 1) / 2, m_0 = ((2, 1) + (2, 2)) / 2
    assert torch.allclose(book[0], torch.tensor([2.0, 1.5]) / 1.25)


def test_moving_averages_unchosen_codeword_keeps_its_bits() -> None:
    book = BOOK.clone() / 3
    averages = MovingAverages([book], decay=0.99)
    for _ in range(20_000):  # its count is below what float32 can hold by then
        averages.update(torch.ones(1, 1, 2), torch.zeros(1, 1, 1, dtype=torch.int64))
    assert torch.equal(book[1:], BOOK[1:] / 3)
    assert torch.allclose(book[0], torch.ones(2))


def test_moving_averages_several_books_are_numbered_through() -> None:
    first, second = BOOK[:1].clone(), BOOK[1:].clone()
    averages = MovingAverages([first, second], decay=0.5)
    averages.update(torch.tensor([[[7.0, 7.0]]]), torch.tensor([[[2]]]))
    assert first.tolist() == [[0.0, 0.0]]
    assert second.tolist() == [[4.0, 4.0], [8.0, 8.0]]


def test_moving_averages_segments_of_a_token_count_apart() -> None:
    book = BOOK.clone()
    averages = MovingAverages([book], decay=0.0)
    averages.update(torch.tensor([[[1.0, 2.0, 8.0, 6.0]]]), torch.tensor([[[0, 1]]]))
    assert book.tolist() == [[1.0, 2.0], [8.0, 6.0], [9.0, 9.0]]


def test_split_moves_unused_codewords_beside_the_most_used() -> None:
    book = np.array([[0.0, 0.0], [50.0, 50.0], [10.0, 10.0], [70.0, 70.0]], np.float32)
    use = np.array([6.0, 0.0, 4.0, 0.0], np.float32)
    split = split_most_used(book, use, seed=1)
    assert split[[0, 2]].tolist() == book[[0, 2]].tolist()
    # The first dead one halves the use of 6 to 3; then 4 is the largest
    spread = 0.01 * 5.0
    assert np.abs(split[1] - book[0]).max() < 5 * spread
    assert np.abs(split[3] - book[2]).max() < 5 * spread
    assert not np.array_equal(split[1], book[0])


@pytest.mark.parametrize("use", [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
def test_split_without_dead_or_without_used_codewords_changes_nothing(use: list[float]) -> None:
    split = split_most_used(BOOK.numpy(), np.array(use, np.float32), seed=1)
    assert np.array_equal(split, BOOK.numpy())
