"""Batches and serving, alone and on Ray. One Ray cluster serves all tests here, and ends with the last of them."""
