// An uploader outside Python: Node without packages, JSON rows, one request after another. docs/protocol.md is the
// specification.
//
//     deltaproof conform "exec:node examples/targets/uploader.mjs"

import { createInterface } from "node:readline";

let start; // what the call of that name said
let ts = 0; // of the last request: strictly increasing, whatever the clock does

const calls = {
  hello: () => ({ protocol: 1, name: "node-example", deltas: "json", capabilities: ["feature-store"] }),

  start: (call) => {
    start = call;
  },

  // Answered when the store has acknowledged every row: there is no background, and nothing to ask for later.
  submit: async ({ step, delta }) => {
    for (const [name, key, values] of delta)
      if (key === "-1" || !values.every(Number.isFinite))
        throw new Error(`step ${step}: table ${name}, key ${key}: no such row may be published`);
    for (let at = 0; at < delta.length; at += start.batch_size) await send(step, delta.slice(at, at + start.batch_size));
  },

  check_error: () => null,

  close: () => null,
};

async function send(step, rows) {
  const { url, headers } = start.store;
  for (let attempt = 1; ; attempt++) {
    ts = Math.max(ts + 1, Date.now()); // newer at each attempt: a reader may have passed the last one
    const content = rows.map(
      // Keys are int64 and stay text: a JavaScript number would change those above 2^53.
      ([name, key, values]) =>
        `{"embedding_name":${JSON.stringify(name)},"key_id":${key},"embedding":[${values.map(number)}]}`,
    );
    const version = JSON.stringify(start.version);
    const body = `{"content":[${content}],"write_mode":"MERGE","version":${version},"ts":${ts}}`;
    const error = await post(`${url}/write`, headers, body);
    if (error === null) return;
    if (!error.retriable || attempt >= start.retry_attempts_max)
      throw Object.assign(new Error(`step ${step}: ${rows.length} rows not sent: ${error.text}`), { steps: [step] });
    const wait_ms = Math.min(start.retry_delay_ms_max, start.retry_delay_ms_min * 2 ** (attempt - 1));
    await new Promise((resume) => setTimeout(resume, Math.max(wait_ms, error.retry_after_ms)));
  }
}

// null when the store has taken all of it.
async function post(url, headers, body) {
  try {
    const reply = await fetch(url, { method: "POST", headers, body, signal: AbortSignal.timeout(30_000) });
    const text = await reply.text();
    if (reply.status === 200) return null; // 207: only some rows were applied
    const retriable = reply.status === 207 || reply.status >= 500 || reply.status === 429 || reply.status === 408;
    return { text: `${reply.status} ${text}`, retriable, retry_after_ms: 1000 * (reply.headers.get("retry-after") ?? 0) };
  } catch (error) {
    return { text: String(error.cause ?? error), retriable: true, retry_after_ms: 0 };
  }
}

const number = (value) => (Object.is(value, -0) ? "-0.0" : JSON.stringify(value));

for await (const line of createInterface({ input: process.stdin })) {
  const { call, id, ...rest } = JSON.parse(line);
  const answer = { reply: id };
  try {
    answer.ok = (await calls[call](rest)) ?? null;
  } catch (error) {
    answer.error = { message: error.message, unacknowledged: error.steps ?? [] };
  }
  process.stdout.write(JSON.stringify(answer) + "\n");
}
