// Requests to the server that the page came from.

const KEY = "slimelite-key"; // name of the server's key in sessionStorage

/** The server refused a request: its HTTP `status` and its message. */
class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The answer to a request. Throws a `Refusal` if the server sends an error, and a TypeError if it does not answer. */
async function request(path, settings = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...settings, headers });
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message ?? text;
  } catch {} // a text that is not JSON is shown unchanged
  throw new Refusal(answer.status, message || `the server answered ${answer.status}`);
}

/** The chunks of a streamed answer, as they arrive. */
async function* chunks(body, signal) {
  const path = body.messages ? "v1/chat/completions" : "v1/completions";
  const answer = await request(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server ended its answer too early");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((found) => found.startsWith("data: "))) {
      const data = line.slice("data: ".length).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
