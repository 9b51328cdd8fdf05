// The text of an answer as tokens. A piece is a text with its tokens: {text, tokens}. A token has the server's fields
// {token, bytes, logprob}. After a second request it also has `likely`: {own, others: text -> log-prob}.

const LEAST = 5; // a token this many nats below certainty has the full colour

function textOf({ token, bytes }) {
  return bytes ? new TextDecoder().decode(new Uint8Array(bytes)) : token;
}

/**
 * The pieces of the text of a chunk: one for each token, if the texts of the tokens together give the text. Tokens
 * before and after it, such as the one that opens the thinking, have no text.
 */
function piecesOf(text, tokens) {
  const texts = tokens.map(textOf);
  for (let start = 0; text && start < tokens.length; start++) {
    for (let end = tokens.length; end > start; end--) {
      if (texts.slice(start, end).join("") !== text) continue;
      return tokens.map((token, i) => ({ text: i < start || i >= end ? "" : texts[i], tokens: [token] }));
    }
  }
  return [{ text, tokens }];
}

/** The element of a piece; one without text shows the name of its last token, such as the end of a turn. */
function pieceElement(piece) {
  if (!piece.tokens.length) return document.createTextNode(piece.text);
  const least = Math.min(...piece.tokens.map((token) => token.logprob));
  const much = Math.min(1, Math.max(0, -least) / LEAST) ** 0.7;
  const node = el("b", { class: piece.text ? "token" : "token empty", style: { "--much": `${(100 * much).toFixed(0)}%` } },
    piece.text || piece.tokens.at(-1).token);
  node.piece = piece;
  return node;
}

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  const digits = value >= 0.1 ? value.toFixed(1) : value >= 0.001 ? value.toFixed(3) : value.toExponential(0);
  return `${value >= 99.95 ? 100 : digits} %`;
}

/** A token and the most likely tokens in its place, with their probabilities. */
function tokenNumbers({ token, logprob, likely }) {
  const row = ([name, value, note]) =>
    el("tr", { class: name === token ? "chosen" : null }, el("th", {}, el("code", {}, JSON.stringify(name)), note),
      el("td", {}, percent(value)), el("td", { class: "dim" }, value.toFixed(3).replace("-", "−")));
  if (!likely) return el("table", {}, row([token, logprob]));
  const all = [...Object.entries(likely.others), [token, likely.own]].sort((one, other) => other[1] - one[1]);
  const rows = [...new Map(all)].map(row);
  // temperature and top-p change the probabilities that the token was drawn with; those of the others are without them
  const drawn = Math.abs(likely.own - logprob) > 0.01 ? [row([token, logprob, " as drawn"])] : [];
  return el("table", {}, ...drawn, ...rows);
}
