"""The end of clients that tests opened."""

import pytest
from serving import close_kept


@pytest.fixture(autouse=True)
def close_clients():
    yield
    close_kept()
