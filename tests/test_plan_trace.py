"""Traces: every format from lines to rows, statistics of the public ones, and bad lines."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.plan.trace import MAX_LINE_CHARACTERS, TraceRow, read_trace
from kvferry.plan.workload import prompt_lengths, representative
from plan_kit import traces

# The first rows of the public traces: Azure/AzurePublicDataset (CC-BY 4.0, Patel et al., ISCA 2024) and
# kvcache-ai/Mooncake (Apache-2.0, Qin et al., FAST 2025).
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,8\n"
    "2023-11-16 18:17:04.0781490,110,27\n"
)
MOONCAKE = (
    '{"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 2354]}\n'
    '{"timestamp": 30535, "input_length": 400, "output_length": 26, "hash_ids": [46]}\n'
)
BURST = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,1,2.0,GPT-4,472,18,490,Conversation log\n45,2,3.0,ChatGPT,1087,230,1317,API log\n"
)
LENGTHS = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.9\n2015,156,2171,12.9\n"
)


def rows(text: str, source: str = "trace") -> list[TraceRow]:
    return list(read_trace(text.splitlines(keepends=True), source))


def test_azure_rows() -> None:
    """Azure's CSV: seconds from the first request, to the microsecond."""
    found = rows(AZURE)
    assert [row.arrival_seconds for row in found] == pytest.approx([0.0, 0.052, 0.098189])
    assert [(row.prompt_tokens, row.output_tokens) for row in found] == [(4808, 10), (3180, 8), (110, 27)]


def test_mooncake_rows() -> None:
    """Mooncake's JSONL: milliseconds, and the prefix hashes."""
    first, second = rows(MOONCAKE)
    assert first == TraceRow(0.0, 1030, 52, (46, 47, 2354))
    assert second[1:] == (400, 26, (46,))
    assert second.arrival_seconds == pytest.approx(3.053)


def test_burstgpt_and_lengths() -> None:
    """BurstGPT's CSV has times in seconds; a CSV of lengths has none."""
    assert rows(BURST) == [TraceRow(0.0, 472, 18), TraceRow(40.0, 1087, 230)]
    assert rows(LENGTHS) == [TraceRow(None, 3772, 54), TraceRow(None, 2015, 156)]
    own = "prompt_tokens,output_tokens,arrival_seconds\n10,1,0.5\n20,2,0.75\n"
    assert rows(own) == [TraceRow(0.0, 10, 1), TraceRow(0.25, 20, 2)]


def test_a_trace_is_read_as_it_is_asked_for() -> None:
    """One row needs only its line: the rest of an endless trace is not read."""
    endless = itertools.chain(AZURE.splitlines()[:1], itertools.repeat("2023-11-16 18:17:03,1,1"))
    assert len(list(itertools.islice(read_trace(endless, "t"), 1000))) == 1000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "t, line 1: is empty"),
        ("\n \n", "t, line 1: is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "t, line 1: no request"),
        ("a,b\n1,2\n", "t, line 1: none of the columns ContextTokens"),
        (AZURE.replace("3180", "-3180"), "t, line 3: ContextTokens: '-3180'"),
        (AZURE.replace("3180", "NaN"), "t, line 3: ContextTokens: 'NaN'"),
        (AZURE.replace("3180,8", "3180,0"), "t, line 3: GeneratedTokens: 0"),
        (AZURE.replace("3180,8", "3180.5,8"), "t, line 3: ContextTokens: 3180.5"),
        (AZURE.replace("3180,8", "3180"), "t, line 3: 2 fields"),
        (AZURE.replace("18:17:04.03", "25:17:04.03"), "t, line 3: TIMESTAMP"),
        (AZURE.replace("18:17:04.07", "18:17:03.07"), "t, line 4: the time goes back"),
        (AZURE.replace("04.0319600", "04.0319600+00:00"), "t, line 3: TIMESTAMP"),
        (MOONCAKE.replace('"output_length": 26', '"output": 26'), "t, line 2: unknown key `output`"),
        (MOONCAKE.replace("400", "NaN"), "t, line 2"),
        (MOONCAKE.replace("400", "-4"), "t, line 2: input_length"),
        (MOONCAKE.replace("400", "4000"), "t, line 2: hash_ids: 1 ids for 4000 tokens"),
        (MOONCAKE.replace('"timestamp": 30535', '"timestamp": 3'), "t, line 2: the time goes back by 27.479"),
        (MOONCAKE.replace('{"timestamp": 30535', '"timestamp": 30535'), "t, line 2"),
        ("prompt_tokens,output_tokens,prompt_tokens\n1,2,3\n", "t, line 1: column prompt_tokens comes twice"),
        ("prompt_tokens,output_tokens,ContextTokens\n1,2,3\n", "t, line 1: columns ContextTokens and prompt"),
        (LENGTHS + f"{'1' * 200_000},1\n", "is not CSV: field larger"),
        (LENGTHS.replace("2015", "1e300"), "t, line 3: num_prefill_tokens"),
    ],
)
def test_a_bad_trace_names_line_and_key(text: str, says: str) -> None:
    """A row that cannot be used is refused in one line with its line number and column."""
    with pytest.raises(InputError) as caught:
        rows(text, "t")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_without_end_is_refused() -> None:
    """A line above the limit is refused whatever it holds."""
    line = (
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [' + "1," * MAX_LINE_CHARACTERS
    )
    with pytest.raises(InputError, match=f"t, line 2: has more than {MAX_LINE_CHARACTERS} characters"):
        list(read_trace([MOONCAKE.splitlines()[0], line], "t"))


def test_representative_lengths_keep_the_mean() -> None:
    """A few lengths stand for many, in their order: same mean within 0.1 %, second moment within 2 %."""
    lengths = np.random.default_rng(1).lognormal(7, 1, 20_000).astype(np.int64) + 1
    few = representative(lengths)
    assert len(few) == len(lengths)
    assert len(np.unique(few)) <= 1024
    assert np.corrcoef(few, lengths)[0, 1] > 0.99
    assert few.mean() == pytest.approx(lengths.mean(), rel=1e-3)
    assert (few**2).mean() == pytest.approx((lengths**2).mean(), rel=0.02)
    assert representative(lengths[:10]).tolist() == lengths[:10].tolist()


# Published statistics: requests, requests a second, mean prompt, mean output.
@pytest.mark.parametrize(
    ("name", "count", "rate", "prompt", "output"),
    [
        ("AzureLLMInferenceTrace_code.csv", 8_819, 2.57, 2_048, 28),
        ("AzureLLMInferenceTrace_conv.csv", 19_366, 5.53, 1_155, 211),
        ("mooncake_conversation_trace.jsonl", 12_031, 3.40, 12_035, 343),
        ("mooncake_synthetic_trace.jsonl", 3_993, 3.91, 15_325, 149),
    ],
)
def test_public_traces(name: str, count: int, rate: float, prompt: float, output: float) -> None:
    """The public traces have the requests, the rate and the mean lengths that are known of them."""
    with (traces() / name).open() as file:
        found = list(read_trace(file, name))
    span = found[-1].arrival_seconds
    assert span is not None
    assert len(found) == count
    assert len(found) / span == pytest.approx(rate, rel=0.005)
    assert prompt_lengths(found).mean() == pytest.approx(prompt, abs=0.5)
    assert np.mean([row.output_tokens for row in found]) == pytest.approx(output, abs=0.5)
