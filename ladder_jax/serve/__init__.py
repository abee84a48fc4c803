"""An engine behind HTTP, with OpenAI's API (https://platform.openai.com/docs/api-reference).

Needs the extra `serve`.
"""
