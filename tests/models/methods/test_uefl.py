import pytest
import torch
from torch import Tensor

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.codebook import (
    codebook_loss,
    nearest_codewords,
    perplexity,
    straight_through,
)
from fedsilo.models.methods.uefl import UEFLSettings, uncertain_sites
from fedsilo.models.methods.uefl_books import gaussian_codebook, segment_dimension
from fedsilo.models.methods.uefl_network import UEFLNetwork
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task

BOOK = torch.tensor([[0.0, 0.0], [4.0, 4.0]])


def _network(books: dict[str, Tensor] | None = None, **changes: float) -> UEFLNetwork:
    classifier = build_classifier(CommonSettings(width=1), Task((1, 16, 16), 3))  # 4 tokens of 4
    settings = UEFLSettings(**changes)  # type: ignore[arg-type]  # field by field in the tests
    dimension = 4 // settings.segments
    return UEFLNetwork(
        classifier, books or {"0": gaussian_codebook(5, dimension, 1, 0)}, settings
    ).eval()


def _images() -> Tensor:
    return torch.randn(6, 1, 16, 16, generator=torch.Generator().manual_seed(5))


def test_each_token_takes_the_nearest_of_two_codewords() -> None:
    tokens = torch.tensor([[[1.0, 1.0], [3.0, 2.5]], [[-9.0, 0.0], [9.0, 9.0]]])
    found = nearest_codewords(tokens, BOOK)
    assert found.codes.tolist() == [[[0], [1]], [[0], [1]]]
    assert found.codewords.tolist() == [[[0.0, 0.0], [4.0, 4.0]], [[0.0, 0.0], [4.0, 4.0]]]


def test_segments_of_a_token_choose_for_themselves_from_one_book() -> None:
    tokens = torch.tensor([[[0.1, 0.0, 3.9, 4.0], [4.1, 4.0, 4.0, 4.0]]])
    found = nearest_codewords(tokens, BOOK, segments=2)
    assert found.codes.tolist() == [[[0, 1], [1, 1]]]
    assert found.codewords.tolist() == [[[0.0, 0.0, 4.0, 4.0], [4.0] * 4]]


def test_a_gradient_passes_straight_through_to_the_tokens() -> None:
    tokens = torch.tensor([[[1.0, 1.0], [3.0, 2.5]]], requires_grad=True)
    book = BOOK.clone().requires_grad_()
    read = straight_through(tokens, nearest_codewords(tokens, book).codewords)
    assert torch.equal(read, torch.tensor([[[0.0, 0.0], [4.0, 4.0]]]))
    weights = torch.tensor([[[1.0, 2.0], [3.0, -4.0]]])
    (read * weights).sum().backward()
    assert torch.equal(tokens.grad, weights)  # type: ignore[arg-type]  # set by backward
    assert book.grad is None


def test_the_codebook_loss_weighs_the_pull_on_codewords_and_the_commitment_of_tokens() -> None:
    tokens = torch.tensor([[[1.0, 3.0]]], requires_grad=True)
    codewords = torch.tensor([[[0.0, 1.0]]], requires_grad=True)
    loss = codebook_loss(tokens, codewords, codebook_weight=2.0, commitment_weight=0.5)
    assert loss.item() == pytest.approx((2.0 + 0.5) * (1 + 4) / 2)
    loss.backward()
    # d/dc of mean((c - z)^2) over two numbers is c - z = (-1, -2), and z - c for the tokens.
    assert codewords.grad is not None
    assert codewords.grad.tolist() == [[[2.0 * -1, 2.0 * -2]]]
    assert tokens.grad is not None
    assert tokens.grad.tolist() == [[[0.5 * 1, 0.5 * 2]]]


@pytest.mark.parametrize("codes", [1, 2, 32])
def test_the_perplexity_of_uniform_use_is_the_number_of_codes(codes: int) -> None:
    assert perplexity(torch.full((codes,), 7)) == pytest.approx(codes)


def test_the_perplexity_of_a_book_of_which_one_code_is_used_is_one() -> None:
    assert perplexity(torch.tensor([0, 12, 0, 0])) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("gamma", "uncertain"),
    [
        (0.0, ["s1b", "s2a", "s3a"]),
        (0.5, ["s2a", "s3a"]),  # threshold 0.375
        (1.0, ["s3a"]),  # threshold 0.5, which s2a meets: eq. 9 has "at most"
        (3.0, []),
    ],
)
def test_a_site_is_uncertain_above_one_plus_gamma_times_the_least_entropy(
    gamma: float, uncertain: list[str]
) -> None:
    entropies = {"s3a": 0.75, "s1a": 0.25, "s2a": 0.5, "s1b": 0.3125}
    assert uncertain_sites(entropies, gamma) == uncertain


def test_segments_divide_the_channels_or_are_refused() -> None:
    assert segment_dimension(64, 4) == 16
    with pytest.raises(SettingError, match=r"'uefl.segments' .*64 channels, but is 3"):
        segment_dimension(64, 3)


def test_codebook_concatenates_books_in_the_order_of_their_numbers() -> None:
    books = {name: torch.full((2, 4), float(name)) for name in ("10", "2", "0")}
    assert _network(books).codebook()[:, 0].tolist() == [0.0, 0.0, 2.0, 2.0, 10.0, 10.0]


def test_the_head_reads_nothing_but_codewords_of_the_books_given() -> None:
    network = _network({"0": torch.eye(4), "1": -torch.eye(4)})
    read = network.features(network.encode(_images())).reshape(-1, 4)
    distance = torch.cdist(read, network.codebook()).min(dim=1).values
    assert distance.max().item() < 1e-5


def test_a_further_book_never_moves_a_token_away_from_its_codeword() -> None:
    first, second = gaussian_codebook(3, 4, 1, 0), gaussian_codebook(3, 4, 1, 1)
    tokens = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(2))
    small, large = _network({"0": first}), _network({"0": first, "1": second})
    assert torch.equal(large.codebook()[:3], small.codebook())
    errors = [
        (network.nearest(tokens).codewords - tokens).square().sum(dim=2)
        for network in (small, large)
    ]
    assert bool((errors[1] <= errors[0] + 1e-5).all())
    assert bool((errors[1] < errors[0] - 1e-3).any())


def test_the_loss_is_the_task_loss_and_the_weighted_codebook_terms() -> None:
    network, labels = _network(), torch.tensor([0, 1] * 3)
    tokens = network.encode(_images())
    codewords = network.nearest(tokens).codewords
    task = torch.nn.functional.cross_entropy(network.classify(codewords), labels)
    expected = task + 1.25 * (codewords - tokens).square().mean()
    assert network.loss(_images(), labels).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_mean_as_threshold_finds_fewer_uncertain_sites_than_the_least() -> None:
    entropies = {"a": 1.0, "b": 2.0, "c": 3.0}  # mean 2; times 1.3: 2.6, the least's 1.3
    assert uncertain_sites(entropies, 0.3, "least") == ["b", "c"]
    assert uncertain_sites(entropies, 0.3, "mean") == ["c"]


def test_layer_normalised_tokens_have_mean_zero_and_deviation_one() -> None:
    tokens = _network(token_norm="layer").encode(_images())
    assert torch.allclose(tokens.mean(dim=-1), torch.zeros(6, 4), atol=1e-5)
    assert torch.allclose(tokens.std(dim=-1, unbiased=False), torch.ones(6, 4), atol=0.05)


def test_few_centroids_are_said_where_codes_times_floor_exceed_the_features() -> None:
    sites = {"s1": 900, "s2": 400, "s3": 2560}
    (told,) = UEFLSettings(codes=256).few_centroids(sites)
    assert told.startswith("2 sites (site s2 has 400 features) cannot fill 'uefl.codes' (256)")
    assert not UEFLSettings(codes=256, centroid_min_count=1).few_centroids(sites)
    gaussian = UEFLSettings(codes=256, codeword_start="gaussian", refresh="none")
    assert not gaussian.few_centroids(sites)
