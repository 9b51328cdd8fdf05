"""An MCP server with state, as a command of --environment mcp."""

import os

from mcp.server import MCPServer
from mcp.types import EmbeddedResource, ImageContent, ResourceLink, TextContent, TextResourceContents

server = MCPServer("counter")
total = 0


@server.tool()
def add(number: int) -> int:
    """Add a number to the total, and say it."""
    global total
    total += number
    return total


@server.tool()
def crash() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def look() -> list[TextContent | ResourceLink | EmbeddedResource | ImageContent]:
    """Everything that a result may hold."""
    inside = TextResourceContents(uri="file:///notes.txt", text="seven")
    return [
        TextContent(type="text", text="two files"),
        ResourceLink(type="resource_link", name="plan", uri="file:///plan.md", description="What comes next."),
        EmbeddedResource(type="resource", resource=inside),
        ImageContent(type="image", data="AA==", mime_type="image/png"),
    ]


if __name__ == "__main__":
    server.run()
