"""HTTP/1.1 on asyncio protocols: a small server, and a client with a pool of kept connections.

Nothing here knows what is served. `server.Server` turns bytes into `messages.Request` and calls one handler;
`client.Client` sends one leg and hands back `client.Response`. Both are bounded in size and time.
"""
