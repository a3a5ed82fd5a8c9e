"""A second engine without speculative decoding, which says what it would have sent."""

from .dimension import of_settings

DIMENSION = of_settings(
    "plain_decode",
    "plain decode",
    key="plain-decode",
    kind=True,
    modes={
        "pp": "not driven",
        "dp": "not tried",
        "tp": "not tried, its answers are those of one process",
        "device": "not tried, its answers are those of one process on a CPU",
    },
    happened={
        "plain_decode_differs": (
            "a token was not the one that plain decode sends, as penalties in verify do not count the tokens of the same round",
            lambda run: any(run.another_plainly(number, record) for number, record in run.records),
        )
    },
)
