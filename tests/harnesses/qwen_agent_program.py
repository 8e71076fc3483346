"""An agent of Qwen-Agent with one tool, run by the Python that has qwen-agent: URL, text or raw, task."""

import sys

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("read_file")
class ReadFile(BaseTool):
    description = "Reads a file."
    parameters = [{"name": "file_path", "type": "string", "description": "Where it is.", "required": True}]  # noqa: RUF012

    def call(self, params, **kwargs):
        with open(self._verify_json_format_args(params)["file_path"], encoding="utf-8") as file:
            return file.read()


url, mode, task = sys.argv[1:]
settings = {"max_input_tokens": 4000, "max_retries": 3, "use_raw_api": mode == "raw", "fncall_prompt_type": "nous"}
model = {"model": "scripted", "model_type": "oai", "model_server": url, "api_key": "EMPTY", "generate_cfg": settings}
agent = Assistant(llm=model, system_message="You read files about villages.", function_list=["read_file"])
print(agent.run_nonstream([{"role": "user", "content": task}])[-1]["content"])
