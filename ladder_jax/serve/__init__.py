"""An HTTP server for an engine, with OpenAI's API (https://platform.openai.com/docs/api-reference).

Needs the extra `serve`.
"""
