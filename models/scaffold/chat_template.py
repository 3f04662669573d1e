"""The chat templates of scaffolded folders: the ChatML text that Qwen3-VL and Qwen3.5 were trained on, written anew in Jinja. Used by the
scaffold. Nobody compared that of Qwen3.5 with the original: it has what is known of it.

Content is a string or a list of parts; an image or video part of any role's message becomes one placeholder that the server expands.
"""

_RENDER = """\
{%- set seen = namespace(pictures=0, videos=0) -%}
{%- macro render(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is not none -%}
    {%- for part in content -%}
      {%- if part.type in ('image', 'image_url') -%}
        {%- set seen.pictures = seen.pictures + 1 -%}
        {{- 'Picture ' ~ seen.pictures ~ ': ' if add_vision_id else '' -}}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type in ('video', 'video_url') -%}
        {%- set seen.videos = seen.videos + 1 -%}
        {{- 'Video ' ~ seen.videos ~ ': ' if add_vision_id else '' -}}
        {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- elif part.type == 'text' -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set system = render(messages[0].content) if messages and messages[0].role == 'system' else '' -%}
"""

CHAT_TEMPLATE = (
    _RENDER
    + """\
{%- if tools -%}
  {{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') -}}
  {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
  {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
  {%- for tool in tools -%}
    {{- '\\n' + (tool | tojson) -}}
  {%- endfor -%}
  {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' -}}
  {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n' -}}
  {{- '</tool_call><|im_end|>\\n' -}}
{%- elif messages and messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
      {{- '<|im_start|>user' -}}
    {%- endif -%}
    {{- '\\n<tool_response>\\n' + render(message.content) + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
      {{- '<|im_end|>\\n' -}}
    {%- endif -%}
  {%- elif not (loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\\n' + render(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '\\n' if message.content or not loop.first else '' -}}
      {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
      {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
)

# Thinks unless `enable_thinking` is false. Thoughts of turns before the last user's are left out, unless `preserve_thinking`.
THINKING_TEMPLATE = (
    _RENDER
    + """\
{%- if tools -%}
  {{- '<|im_start|>system\\n# Tools\\n\\nThese functions may be called:\\n<tools>' -}}
  {%- for tool in tools -%}
    {{- '\\n' + (tool | tojson) -}}
  {%- endfor -%}
  {{- '\\n</tools>\\n\\nA call has this form, with nothing behind it:\\n<tool_call>\\n<function=NAME>\\n' -}}
  {{- '<parameter=KEY>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' + ('\\n\\n' + system if system else '') + '<|im_end|>\\n' -}}
{%- elif messages and messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- set last.user = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
      {{- '<|im_start|>user' -}}
    {%- endif -%}
    {{- '\\n<tool_response>\\n' + render(message.content) + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
      {{- '<|im_end|>\\n' -}}
    {%- endif -%}
  {%- elif message.role == 'assistant' -%}
    {%- set thoughts = message.reasoning_content or '' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > last.user or preserve_thinking -%}
      {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- render(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '\\n\\n' if loop.first and message.content else '\\n' if not loop.first else '' -}}
      {{- '<tool_call>\\n<function=' + function.name + '>\\n' -}}
      {%- for name, value in (function.arguments.items() if function.arguments is mapping else []) -%}
        {{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' -}}
      {%- endfor -%}
      {{- '</function>\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif not (loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n<think>\\n' + ('\\n</think>\\n\\n' if enable_thinking is false else '') -}}
{%- endif -%}
"""
)
