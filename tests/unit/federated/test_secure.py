"""Secure aggregation: exact sums, drop-outs, and a server that sees noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait.errors import RunError
from plait.outer.federated import secure
from plait.outer.federated.secure import (
    PRIME,
    SecureClient,
    agree,
    expand,
    join_secret,
    secure_sum,
    split_secret,
)


def is_probable_prime(number: int) -> bool:
    odd = number - 1
    twos = 0
    while odd % 2 == 0:
        odd = odd // 2
        twos = twos + 1
    for base in (2, 3, 5):
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def test_the_group_is_that_of_a_safe_prime() -> None:
    assert PRIME.bit_length() == 2048 and PRIME % 2**64 == 2**64 - 1
    assert is_probable_prime(PRIME) and is_probable_prime((PRIME - 1) // 2)


def test_secrets_need_the_threshold() -> None:
    shares = split_secret(12345, range(5), 3)
    for chosen in ((0, 1, 2), (4, 2, 0), (1, 3, 4)):
        assert join_secret({holder: shares[holder] for holder in chosen}) == 12345
    assert join_secret({holder: shares[holder] for holder in (0, 1)}) != 12345


def vectors(count: int, numel: int = 300) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        client: torch.randint(-(2**40), 2**40, (numel,), generator=generator)
        for client in range(count)
    }


@pytest.mark.parametrize("silent", [(), (1, 3)])
def test_the_sum_is_exact_though_clients_drop_out(silent: tuple[int, ...]) -> None:
    given = vectors(5)
    expected = sum(
        (vector for client, vector in given.items() if client not in silent),
        torch.zeros(300, dtype=torch.int64),
    )
    assert torch.equal(secure_sum(given, silent), expected)


def test_too_few_survivors_keep_the_secret() -> None:
    with pytest.raises(RunError, match="2 clients are left of the 3"):
        secure_sum(vectors(4), silent=(0, 1))


def test_a_single_update_looks_uniform_to_the_server() -> None:
    """A vector of zeros, masked: all bytes are equally likely (chi-square of 255 degrees, 8
    standard deviations).
    """
    clients = [SecureClient(number) for number in range(2)]
    keys = {client.client: client.advertise() for client in clients}
    boxes = [client.share(keys, 2) for client in clients]
    masked = clients[0].mask(
        torch.zeros(20_000, dtype=torch.int64), {1: boxes[1][0], 0: boxes[0][0]}
    )
    counts = torch.bincount(masked.view(torch.uint8).long(), minlength=256).double()
    expected = counts.sum() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 8 * (2 * 255) ** 0.5


def test_masks_cancel_only_together() -> None:
    clients = [SecureClient(number) for number in range(3)]
    keys = {client.client: client.advertise() for client in clients}
    boxes = [client.share(keys, 2) for client in clients]
    zeros = torch.zeros(10, dtype=torch.int64)
    masked = [
        client.mask(zeros, {source: boxes[source][client.client] for source in range(3)})
        for client in clients
    ]
    assert all(bool(vector.any()) for vector in masked)
    assert bool((masked[0] + masked[1]).any())


def test_shares_that_were_changed_on_their_way_are_refused() -> None:
    clients = [SecureClient(number) for number in range(2)]
    keys = {client.client: client.advertise() for client in clients}
    boxes = [client.share(keys, 2) for client in clients]
    spoiled = replace(boxes[1][0], body=bytes(len(boxes[1][0].body)))
    clients[0].mask(torch.zeros(1, dtype=torch.int64), {0: boxes[0][0], 1: spoiled})
    with pytest.raises(RunError, match="changed on their way"):
        clients[0].unmask(frozenset({0, 1}))


def test_keys_outside_the_group_are_refused() -> None:
    for key in (0, 1, PRIME - 1, PRIME):
        with pytest.raises(RunError, match="group"):
            agree(5, key)


def test_fixed_point_round_trips() -> None:
    values = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert (secure.from_fixed(secure.to_fixed(values)) - values).abs().max() <= 2**-25
    assert torch.equal(expand(b"a", 5), expand(b"a", 5)) and not torch.equal(
        expand(b"a", 5), expand(b"b", 5)
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e11])
def test_a_change_that_has_no_sum_is_refused(value: float) -> None:
    with pytest.raises(RunError, match="over 4 clients sums finite values below 1"):
        secure.check_summable(torch.tensor([1.0, value]), 4)
    secure.check_summable(torch.tensor([1.0, -1e11]), 4)
