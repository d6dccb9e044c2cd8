"""Secure aggregation: the server learns the sum of the clients' vectors and nothing else, though
some clients drop out.

K. Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS 2017),
figure 4. All arithmetic on vectors is modulo 2^64. Real values travel as fixed-point numbers, so
the sum of rounded values is exact.

    1. advertise   every client sends two public keys: one for masks, one for a channel to each
                   other client
    2. share       it splits its mask key and a seed b_u of its own among all (Shamir, threshold t),
                   encrypted by pairs
    3. mask        y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv),
                   with s_uv agreed by Diffie-Hellman
    4. unmask      of those that sent y_u, t give shares of b_u of the survivors and of the mask
                   keys of the dropped. Never both are given of one client. The server takes the
                   masks off the sum

This is the honest-but-curious protocol: the server is trusted to relay keys, not to see updates.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import RunError

# The 2048-bit group of RFC 3526, section 3: p = 2^2048 - 2^1984 - 1 + 2^64 ([2^1918 pi] + 124476),
# generator 2.
PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74"
    "020BBEA63B139B22514A08798E3404DDEF9519B3CD3A431B302B0A6DF25F1437"
    "4FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF05"
    "98DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB"
    "9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF695581718"
    "3995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
GENERATOR = 2
KEY_BITS = 256
FIELD = 2**521 - 1  # of Shamir's polynomials; a prime
SECRET_BYTES = KEY_BITS // 8
SHARE_BYTES = 66
FRACTION_BITS = 24


@dataclass(frozen=True)
class PublicKeys:
    """The public keys that a client advertises."""

    mask: int
    channel: int


@dataclass(frozen=True)
class Ciphertext:
    """Shares for one other client, encrypted and signed with the key of the pair."""

    body: bytes
    tag: bytes


def agree(private: int, public: int) -> bytes:
    """The secret of two clients, from one's private and the other's public key. Refuses keys
    outside the group.

    Raises:
        RunError: a key outside the group.
    """
    if not 1 < public < PRIME - 1:
        raise RunError("a public key is not in the group")
    return hashlib.sha256(pow(public, private, PRIME).to_bytes(256, "big")).digest()


def expand(seed: bytes, numel: int) -> Tensor:
    """A vector (numel,) of uniform 64-bit numbers from a seed: SHAKE-256 as the generator."""
    return torch.frombuffer(bytearray(hashlib.shake_256(seed).digest(8 * numel)), dtype=torch.int64)


def split_secret(secret: int, holders: Iterable[int], threshold: int) -> dict[int, int]:
    """Shamir's shares: the values at holder + 1 of a random polynomial of degree threshold - 1
    whose constant is the secret.
    """
    coefficients = [secret, *(secrets.randbelow(FIELD) for _ in range(threshold - 1))]

    def value_at(point: int) -> int:
        """The value of the polynomial, by Horner's rule."""
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % FIELD
        return value

    return {holder: value_at(holder + 1) for holder in holders}


def join_secret(shares: Mapping[int, int]) -> int:
    """The constant of the polynomial through the shares."""
    total = 0
    for holder, value in shares.items():
        top = 1
        bottom = 1
        for other in shares:
            if other != holder:
                top = top * (other + 1) % FIELD
                bottom = bottom * (other - holder) % FIELD
        total += value * top * pow(bottom, -1, FIELD)
    return total % FIELD


def to_fixed(values: Tensor) -> Tensor:
    """Real values [...] as 64-bit fixed-point numbers with `FRACTION_BITS` binary places."""
    return (values.double() * 2**FRACTION_BITS).round().to(torch.int64)


def check_summable(values: Tensor, num_clients: int) -> None:
    """Raise `RunError` for values [...] of which a sum over clients could leave 64 bits."""
    limit = 2.0 ** (63 - FRACTION_BITS) / num_clients
    largest = float(values.abs().max())
    if not largest < limit:  # also where it is no number
        raise RunError(
            f"a change times its examples has the value {largest:g}, and secure aggregation over "
            f"{num_clients} clients sums finite values below {limit:.3g}; lower train.lr"
        )


def from_fixed(values: Tensor) -> Tensor:
    """The real values [...] (float64) of fixed-point numbers."""
    return values.double() / 2**FRACTION_BITS


class SecureClient:
    """One client's side of one round. Keys are of this round alone."""

    def __init__(self, client: int) -> None:
        self.client = client
        self._mask_key = secrets.randbits(KEY_BITS)
        self._channel_key = secrets.randbits(KEY_BITS)
        self._seed = secrets.randbits(KEY_BITS)
        self._keys: Mapping[int, PublicKeys] = {}
        self._received: Mapping[int, Ciphertext] = {}
        self._channels: dict[int, bytes] = {}

    def advertise(self) -> PublicKeys:
        """Step 1 of the protocol: this client's two public keys, for all others."""
        return PublicKeys(
            pow(GENERATOR, self._mask_key, PRIME), pow(GENERATOR, self._channel_key, PRIME)
        )

    def share(self, keys: Mapping[int, PublicKeys], threshold: int) -> dict[int, Ciphertext]:
        """Step 2: for every client that advertised, this one included.

        Raises:
            RunError: fewer clients than the threshold.
        """
        if len(keys) < threshold:
            raise RunError(
                f"{len(keys)} clients are fewer than the threshold {threshold} of secure "
                "aggregation"
            )
        self._keys = dict(keys)
        of_key, of_seed = (
            split_secret(secret, keys, threshold) for secret in (self._mask_key, self._seed)
        )
        return {
            other: self._seal(
                other,
                of_key[other].to_bytes(SHARE_BYTES, "big")
                + of_seed[other].to_bytes(SHARE_BYTES, "big"),
            )
            for other in keys
        }

    def mask(self, vector: Tensor, received: Mapping[int, Ciphertext]) -> Tensor:
        """Step 3: `vector` (numel,) of int64 under masks, towards all clients whose shares came."""
        self._received = dict(received)
        masked = vector + expand(self._seed.to_bytes(SECRET_BYTES, "big"), vector.numel())
        for other in received:
            if other != self.client:
                pair = expand(agree(self._mask_key, self._keys[other].mask), vector.numel())
                masked = masked + pair if other > self.client else masked - pair
        return masked

    def unmask(self, survivors: frozenset[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Step 4: (shares of the survivors' seeds, shares of the mask keys of those that dropped
        out after step 2).
        """
        seeds = {}
        keys = {}
        for other, sealed in self._received.items():
            opened = self._open(other, sealed)
            key, seed = (
                int.from_bytes(part, "big") for part in (opened[:SHARE_BYTES], opened[SHARE_BYTES:])
            )
            if other in survivors:
                seeds[other] = seed
            else:
                keys[other] = key
        return seeds, keys

    def _seal(self, other: int, plain: bytes) -> Ciphertext:
        key = self._channel(other)
        body = _xor(plain, key + _route(self.client, other))
        return Ciphertext(body, hmac.digest(key, _route(self.client, other) + body, "sha256"))

    def _open(self, other: int, sealed: Ciphertext) -> bytes:
        key = self._channel(other)
        if not hmac.compare_digest(
            sealed.tag, hmac.digest(key, _route(other, self.client) + sealed.body, "sha256")
        ):
            raise RunError(
                f"the shares that client {other} sent to client {self.client} were changed on "
                "their way"
            )
        return _xor(sealed.body, key + _route(other, self.client))

    def _channel(self, other: int) -> bytes:
        if other not in self._channels:
            self._channels[other] = agree(self._channel_key, self._keys[other].channel)
        return self._channels[other]


def unmask_sum(
    masked: Mapping[int, Tensor],
    keys: Mapping[int, PublicKeys],
    answers: Iterable[tuple[Mapping[int, int], Mapping[int, int]]],
    holders: Iterable[int],
    threshold: int,
) -> Tensor:
    """The server's step 4: the sum of the survivors' vectors (numel,) from their masked ones and
    the shares that `holders` gave.

    Raises `RunError` when fewer than `threshold` clients answered: the sum then stays secret.
    """
    answer_of = dict(zip(holders, answers, strict=True))
    if len(answer_of) < threshold:
        raise RunError(
            f"{len(answer_of)} clients are left of the {threshold} that secure aggregation needs; "
            "the round is void"
        )
    total = torch.stack(list(masked.values())).sum(dim=0)
    numel = total.numel()
    for client in masked:
        seed = join_secret(
            {holder: seeds[client] for holder, (seeds, _) in list(answer_of.items())[:threshold]}
        )
        total = total - expand(seed.to_bytes(SECRET_BYTES, "big"), numel)
    for lost in {client for _, lost_keys in answer_of.values() for client in lost_keys}:
        private = join_secret(
            {
                holder: lost_keys[lost]
                for holder, (_, lost_keys) in list(answer_of.items())[:threshold]
            }
        )
        for client in masked:  # what each survivor added or subtracted because of the lost one
            pair = expand(agree(private, keys[client].mask), numel)
            total = total - pair if lost > client else total + pair
    return total


def _route(source: int, to: int) -> bytes:
    return source.to_bytes(4, "big") + to.to_bytes(4, "big")


def _xor(data: bytes, key: bytes) -> bytes:
    stream = hashlib.shake_256(b"channel" + key).digest(len(data))
    return bytes(a ^ b for a, b in zip(data, stream, strict=True))


def secure_sum(
    vectors: Mapping[int, Tensor], silent: Iterable[int] = (), threshold: int | None = None
) -> Tensor:
    """The whole round in one place: clients with their vectors (numel,) of int64, of whom `silent`
    drop out after step 2.
    """
    threshold = len(vectors) // 2 + 1 if threshold is None else threshold
    clients = {number: SecureClient(number) for number in sorted({*vectors, *silent})}
    keys = {number: client.advertise() for number, client in clients.items()}
    boxes = {number: client.share(keys, threshold) for number, client in clients.items()}
    left = [number for number in clients if number not in set(silent)]
    masked = {}
    for number in left:
        received = {source: boxes[source][number] for source in clients}
        masked[number] = clients[number].mask(vectors[number], received)
    answers = [clients[number].unmask(frozenset(left)) for number in left]
    return unmask_sum(masked, keys, answers, left, threshold)
