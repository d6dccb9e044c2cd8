from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.parallel.data.server import spread_keys


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_no_server_carries_more_than_the_mean_and_one_key(
    num_elements: list[int], num_servers: int
) -> None:
    server_of_key = spread_keys(num_elements, num_servers)
    load = [0] * num_servers
    for key, server in enumerate(server_of_key):
        load[server] += num_elements[key]
    assert max(load) <= sum(num_elements) / num_servers + max(num_elements)
