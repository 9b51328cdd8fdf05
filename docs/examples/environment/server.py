"""The environment of guess.py over HTTP, with only the standard library:   python server.py PORT"""

import json
import re
import sys
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GAMES = {}  # id -> [number, low, high]


def shown(game):
    return [{"role": "user", "content": f"{game[1]}+{game[2]}=?"}]


def reset(body):
    name, game = uuid.uuid4().hex, [int(body["row"]["label"]), 0, 36]
    GAMES[name] = game
    return {"id": name, "messages": shown(game)}


def step(body):
    game = GAMES[body["id"]]
    guess = int(re.findall(r"\d+", body["reply"]["content"] + " 99")[0])
    if guess == game[0] or not game[1] <= guess <= game[2]:
        return {"reward": float(guess == game[0]), "done": True}
    game[1:] = [guess + 1, game[2]] if guess < game[0] else [game[1], guess - 1]
    return {"messages": shown(game), "reward": -0.1}


def close(body):
    del GAMES[body["id"]]
    return {}


ROUTES = {"/reset": reset, "/step": step, "/close": close}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open

    def do_GET(self):
        self.answer(200, {"ready": True})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self.answer(200, ROUTES[self.path](body))
        except Exception as error:
            self.answer(500, {"error": {"message": repr(error)}})

    def answer(self, status, content):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 256  # a rollout opens all episodes at once; with 5, the default, some wait a minute


Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
