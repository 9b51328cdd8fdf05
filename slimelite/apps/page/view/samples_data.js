// The samples of a run. The numbers of all samples are decoded at once, and texts and tokens when a file is opened.

/** Unpack the result of `pack` in slimelite/apps/view_samples.py: {header, columns: name -> typed array}. */
async function unpack(text) {
  const TYPES = { u1: Uint8Array, u2: Uint16Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
  const bytes = new Uint8Array(await inflate(text));
  const size = new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  const columns = {};
  let at = 4 + size;
  for (const [name, type, count] of header.columns) {
    const width = Number(type.slice(1));
    const mixed = new Uint8Array(count * width);
    for (let plane = 0; plane < width; plane++) {
      for (let i = 0; i < count; i++) mixed[i * width + plane] = bytes[at++];
    }
    columns[name] = new TYPES[type](mixed.buffer);
  }
  return { header, columns };
}

/** The offsets of parts with these lengths, and the end of the last part. */
function offsets(lengths) {
  const found = new Int32Array(lengths.length + 1);
  lengths.forEach((length, i) => (found[i + 1] = found[i] + length));
  return found;
}

class Samples {
  constructor(run) {
    this.run = run;
    this.sources = run.samples.sources;
    this.notes = run.samples.notes;
    this.chunks = new Map();
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  }

  /** Decode the data that the lists need. */
  async load() {
    const { index, prompts, vocabulary } = this.run.samples;
    const [numbers, texts, pieces] = await Promise.all([index, prompts, vocabulary].map((part) => part && unpack(part)));
    Object.assign(this, numbers.header, { columns: numbers.columns, prompts: texts.header.texts });
    this.size = numbers.columns.chunk?.length ?? 0;
    this.first = new Int32Array(this.sources.length).fill(-1);
    for (let i = this.size - 1; i >= 0; i--) this.first[this.columns.chunk[i]] = i;
    const rewards = (numbers.columns.reward ?? new Float32Array()).filter(Number.isFinite);
    this.rewardRange = rewards.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [0, 0]);
    this.aged = (numbers.columns.stale ?? []).some(Number.isFinite);
    if (pieces) {
      this.vocabulary = { ...pieces.columns, names: pieces.header.names, starts: offsets(pieces.columns.lengths) };
    }
    return this;
  }

  /** Whether samples of a kind have this number. In supervised training, only samples of evaluations have rewards. */
  has(name, of) {
    return this.run.unit === "rollout" || of.startsWith("eval") || !["reward", "advantage"].includes(name);
  }

  /** The data set's word about a reply, such as "chosen"; "" if there is none. */
  reply(sample) {
    return this.replies[this.columns.reply[sample]];
  }

  source(sample) {
    return this.sources[this.columns.chunk[sample]];
  }

  prompt(sample) {
    return this.prompts[this.columns.prompt[sample]];
  }

  /** The texts and tokens of the file that has the sample. */
  chunk(sample) {
    const i = this.columns.chunk[sample];
    if (!this.chunks.has(i)) {
      const opened = unpack(this.run.samples.chunks[i]);
      this.chunks.set(i, opened.then((chunk) => ({ ...chunk, starts: offsets(chunk.columns.lengths) })));
    }
    return this.chunks.get(i);
  }

  /** All data of one sample. `tokens` is null if the texts of the tokens are unknown. */
  async open(sample) {
    const chunk = await this.chunk(sample);
    const row = sample - this.first[this.columns.chunk[sample]];
    const { responses, labels, metadata, rewards } = chunk.header;
    const [start, end] = [chunk.starts[row], chunk.starts[row + 1]];
    const known = responses[row] === null;
    return {
      response: known ? this.text(chunk, start, end) : responses[row],
      label: labels[row],
      metadata: metadata[row],
      rewards: rewards[row],
      tokens: known ? { columns: chunk.columns, start, end } : null,
    };
  }

  /** Only the response. This is faster than decoding the whole sample. */
  async response(sample) {
    const chunk = await this.chunk(sample);
    const row = sample - this.first[this.columns.chunk[sample]];
    return chunk.header.responses[row] ?? this.text(chunk, chunk.starts[row], chunk.starts[row + 1]);
  }

  text(chunk, start, end) {
    const { bytes, starts } = this.vocabulary;
    const entries = chunk.columns.token;
    let length = 0;
    for (let i = start; i < end; i++) length += starts[entries[i] + 1] - starts[entries[i]];
    const joined = new Uint8Array(length);
    let at = 0;
    for (let i = start; i < end; i++) {
      for (let k = starts[entries[i]]; k < starts[entries[i] + 1]; k++) joined[at++] = bytes[k];
    }
    return this.decoder.decode(joined);
  }

  /**
   * The response as spans [{text, tokens}]. `tokens` are counted from the start of the response. Each token has its own
   * span, except that the tokens of one character share a span. The joined texts are the response.
   */
  spans({ columns, start, end }) {
    const { bytes, starts } = this.vocabulary;
    const spans = [];
    let open = null; // the bytes of the last span with text
    for (let i = start; i < end; i++) {
      const piece = bytes.subarray(starts[columns.token[i]], starts[columns.token[i] + 1]);
      if (open && piece.length && piece[0] >> 6 === 2) {
        open.bytes = Uint8Array.of(...open.bytes, ...piece);
        open.span.tokens.push(i - start);
        open.span.text = this.decoder.decode(open.bytes);
        continue;
      }
      const span = { text: this.decoder.decode(piece), tokens: [i - start] };
      spans.push(span);
      if (piece.length) open = { bytes: piece, span };
    }
    return spans;
  }

  /** The id of a token of the response, and the name of a special one. */
  token({ columns, start }, k) {
    const id = this.vocabulary.ids[columns.token[start + k]];
    return { id, name: this.vocabulary.names[id] };
  }
}

/** The samples of a run, decoded once. */
function samplesOf(run) {
  run.decoded ??= new Samples(run).load();
  return run.decoded;
}

/** A number of a token. In fixed-point columns, it is a multiple of a step, and the least integer means NaN. */
function tokenNumber({ columns, start }, name, k) {
  const STEPS = { engine: 1e-3, difference: 1e-4, entropy: 1e-3, version: 1 };
  const values = columns[name];
  if (!values) return NaN;
  const value = values[start + k];
  if (values instanceof Float32Array || values instanceof Uint8Array) return value;
  return value === (values instanceof Int16Array ? -(2 ** 15) : -(2 ** 31)) ? NaN : value * STEPS[name];
}
