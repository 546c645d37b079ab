// What /metrics says, as far as the page shows it: the sum over the models of the server.

const SAMPLE = /^([\w:]+?)(?:\{(.*)\})? ([\d.eE+-]+|NaN|\+Inf)$/;
const NAMES = {
  num_requests_running: "running",
  num_requests_waiting: "waiting",
  generation_tokens_total: "tokens",
  time_to_first_token_seconds_count: "firstTokens",
  time_to_first_token_seconds_sum: "firstTokenSeconds",
  inter_token_latency_seconds_count: "gaps",
  inter_token_latency_seconds_sum: "gapSeconds",
  prompt_tokens_total: "promptTokens",
  prompt_tokens_cached_total: "cachedTokens",
};

export function parse(text) {
  const now = { blocks: {}, ...Object.fromEntries(Object.values(NAMES).map((name) => [name, 0])) };
  for (const line of text.split("\n")) {
    const sample = SAMPLE.exec(line);
    if (!sample) continue;
    const name = Object.keys(NAMES).find((suffix) => sample[1].endsWith(suffix)); // whatever the prefix
    if (name) now[NAMES[name]] += Number(sample[3]);
    if (sample[1].endsWith("kv_blocks")) {
      const state = /state="(\w+)"/.exec(sample[2])[1];
      now.blocks[state] = (now.blocks[state] ?? 0) + Number(sample[3]);
    }
  }
  return now;
}
