"""Play a task from a taskset of verifiers 0.4, which drives the conversation and scores it:

    verifiers_task.py TASKSET [SETTING=VALUE ...] [--harness ID]

It needs only verifiers, in its own environment, and uv on the PATH, which verifiers uses to start programs.
``{"index": 3}`` in the metadata of a row selects the task.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import env_config_type, load_environment


def setting(text):
    """The name and the value: parsed as JSON if possible, otherwise the text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def environment(options):
    """The taskset's own environment. The run's model plays every role in it, on this machine."""
    config = env_config_type(options.taskset)
    seats = [name for name, field in config.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    seat = {"harness": {"id": options.harness}, "runtime": {"type": "subprocess"}}
    taskset = {"id": options.taskset, **dict(map(setting, options.settings))}
    return load_environment(config.model_validate({"taskset": taskset, **{name: dict(seat) for name in seats}}))


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("taskset")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="of the taskset")
    parser.add_argument(
        "--harness", default="null", help="the harness that asks the model; the harness null has no tools"
    )
    options = parser.parse_args()
    index = json.loads(sys.stdin.readline())["metadata"]["index"]
    played = environment(options)
    task = next(itertools.islice(played.taskset, index, None), None)  # some tasksets have no end
    if task is None:
        sys.exit(f"the taskset {options.taskset} has no task {index}")
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(client=client, model="mine", sampling=vf.SamplingConfig())
    async with played.serving():
        episode = await played.run_episode(task, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        sys.exit("; ".join(error.message for error in errors))
    print(json.dumps({"reward": sum(trace.reward for trace in episode.traces if trace.agent.trainable)}))


asyncio.run(main())
