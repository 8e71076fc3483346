"""What `mwjax record` adds to a call: ``python tests/benchmarks/record_latency.py [streams] [rounds]``.

An engine that answers as vLLM does, the recorder and the client are processes of their own on loopback. Rounds of
direct calls and of calls through the recorder take turns; in each, 50 streams are open at once, begun over one second,
each with a prompt of 20,000 characters and 2,000 ids and with 40 events 20 ms apart. Both are asked for token ids and
log-probs by the recorder, which takes them out again. Times in milliseconds, medians (and 95th percentiles):

first event    from the request's start; event: from the engine's write to the client's read; last byte: from the
               engine's last event to the end of the answer, which waits for the line in the log
whole answer   one call at a time, not streamed, from the request's start to its last byte

The claim is that every median is within 5 ms of that of the direct calls. Where other work shares the cores, ask the
system for precedence, or its queues are measured: ``chrt -r 1 python tests/benchmarks/record_latency.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

from aiohttp import ClientSession, TCPConnector, web

EVENTS, GAP_SECONDS, SPREAD_SECONDS, WHOLE_CALLS = 40, 0.02, 1.0, 40
PROMPT_IDS = list(range(100_000, 102_000))
Times = dict[str, list[float]]


async def engine() -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.method == "GET":
            return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})
        payload = json.loads(body)
        ids, logprobs = payload.get("return_token_ids"), payload.get("logprobs")
        prompt = PROMPT_IDS if ids else None

        def choice(text: str, name: str, finish: str | None) -> dict:
            found = (
                {"content": [{"token": text, "logprob": -0.5, "bytes": [1, 2], "top_logprobs": []}]}
                if logprobs
                else None
            )
            part = {"role": "assistant", "content": text}
            return {
                "index": 0,
                name: part,
                "logprobs": found,
                "finish_reason": finish,
                "token_ids": [5] if ids else None,
            }

        head = {"id": "c", "created": 1, "model": "m", "prompt_token_ids": prompt}
        if not payload.get("stream"):
            return web.json_response(
                {**head, "object": "chat.completion", "choices": [choice("word", "message", "stop")]}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(EVENTS):
            await asyncio.sleep(GAP_SECONDS)
            last = number == EVENTS - 1
            chunk = {
                **head,
                "object": "chat.completion.chunk",
                "choices": [choice(" word", "delta", "stop" if last else None)],
            }
            if number:
                chunk.pop("prompt_token_ids")
            chunk["system_fingerprint"] = repr(time.monotonic())
            await response.write(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    runner = web.ServerRunner(web.Server(handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def request_body(stream: bool) -> bytes:
    return json.dumps(
        {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "word " * 4000}]}
    ).encode()


async def one_stream(session: ClientSession, base: str, after: float, times: Times) -> None:
    await asyncio.sleep(after)
    begun, sent, first = time.monotonic(), 0.0, True
    async with session.post(f"{base}/v1/chat/completions", data=request_body(True)) as response:
        async for line in response.content:
            arrived = time.monotonic()
            if line.startswith(b"data: {"):
                sent = float(json.loads(line[6:])["system_fingerprint"])
                if first:
                    times["first event"].append(arrived - begun)
                    first = False
                times["event"].append(arrived - sent)
    times["last byte"].append(time.monotonic() - sent)


async def measure(direct: str, recorder: str, streams: int, rounds: int) -> dict[str, Times]:
    results: dict[str, Times] = {"direct": defaultdict(list), "recorded": defaultdict(list)}
    async with ClientSession(connector=TCPConnector(limit=0)) as session:
        for turn in range(rounds + 1):
            for name, base in (("direct", direct), ("recorded", recorder)):
                times: Times = defaultdict(list)
                starts = (number * SPREAD_SECONDS / streams for number in range(streams))
                await asyncio.gather(*(one_stream(session, base, start, times) for start in starts))
                for _ in range(WHOLE_CALLS):
                    begun = time.monotonic()
                    async with session.post(f"{base}/v1/chat/completions", data=request_body(False)) as response:
                        await response.read()
                    times["whole answer"].append(time.monotonic() - begun)
                if turn:  # the first round warms up
                    for what, found in times.items():
                        results[name][what] += found
    return results


def main(streams: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        upstream = subprocess.Popen([sys.executable, __file__, "engine"], stdout=subprocess.PIPE, text=True)
        assert upstream.stdout is not None
        direct = upstream.stdout.readline().strip()
        command = [sys.executable, "-m", "mwjax", "record", direct, "--port", "0", "--run-dir", folder]
        recorder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert recorder.stdout is not None
        try:
            recorder.stdout.readline()
            base = recorder.stdout.readline().strip().removeprefix("OPENAI_BASE_URL=").removesuffix("/v1")
            results = asyncio.run(measure(direct, base, streams, rounds))
            recorder.terminate()
            print(recorder.stdout.read().splitlines()[-1])
        finally:
            recorder.kill()
            upstream.kill()
    print(f"{streams} streams at once; milliseconds, median (95th percentile)")
    for what in ("first event", "event", "last byte", "whole answer"):
        cells = []
        for name in ("direct", "recorded"):
            found = sorted(1e3 * each for each in results[name][what])
            cells.append((statistics.median(found), found[int(0.95 * len(found))]))
        (before, before_95), (after, after_95) = cells
        direct_cell, recorded_cell = f"{before:7.2f} ({before_95:7.2f})", f"{after:7.2f} ({after_95:7.2f})"
        print(f"{what:13} direct {direct_cell}   recorded {recorded_cell}   added {after - before:6.2f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["engine"]:
        asyncio.run(engine())
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("streams", type=int, nargs="?", default=50)
        parser.add_argument("rounds", type=int, nargs="?", default=3)
        main(**vars(parser.parse_args()))
