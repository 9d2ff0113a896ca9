"""The Ray cluster of the tests."""

import pytest
import ray_cluster


@pytest.fixture(scope="package")
def cluster():
    """A Ray cluster of two nodes."""
    with ray_cluster.two_nodes(REDRAFT_API_KEY=ray_cluster.KEY) as running:
        yield running
