"""Numbers as people read them."""

import pytest

from ckptrain.cli.wording import bytes_text, count_text, duration_text, plural


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (24_330_240, "24.3 MB"),
        (999_600_000, "1.00 GB"),
        (28e9, "28.0 GB"),
    ],
)
def test_sizes_have_three_digits_and_decimal_units(num_bytes: float, text: str) -> None:
    """The units of disks."""
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(("count", "text"), [(960, "960"), (1234.4, "1.23k"), (134_515_008, "135M"), (7.6e9, "7.60B")])
def test_counts_have_three_digits(count: float, text: str) -> None:
    """The letters that model names use."""
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.414, "0.41 s"),
        (17.2, "17 s"),
        (59.9, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (4 * 86400, "4 days"),
    ],
)
def test_lengths_of_time_have_their_largest_units(seconds: float, text: str) -> None:
    """No one reads 12,345 s."""
    assert duration_text(seconds) == text


def test_a_count_of_one_is_singular() -> None:
    """And large counts have separators."""
    assert [plural(1, "process"), plural(2, "process"), plural(1024, "token")] == [
        "1 process",
        "2 processes",
        "1,024 tokens",
    ]
