// An agent of the AI SDK against the front; scripts/test_clients.sh runs it in the folder of the packages.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const here = createRequire(`${process.cwd()}/`);
const load = async (name) => import(pathToFileURL(here.resolve(name)));
const { generateText, streamText, stepCountIs, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");

const openai = createOpenAI({ baseURL: `${process.env.RULED_URL}/v1`, apiKey: process.env.API_KEY });
const get_weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `12 degrees in ${city}`,
});
for (const model of [openai("ruled"), openai.chat("ruled")]) {
  const settings = { model, tools: { get_weather }, prompt: "What is the weather in Paris?", stopWhen: stepCountIs(3) };
  assert.equal((await generateText(settings)).text, "It is 12 degrees in Paris.");
  const stream = streamText(settings);
  let parts = 0;
  for await (const _ of stream.fullStream) parts += 1;
  assert.equal(await stream.text, "It is 12 degrees in Paris.");
  assert(parts > 10);
}
const version = here("ai/package.json").version;
console.log(`AI SDK ${version}: an agent with a tool, by Responses and by Chat, whole and streamed`);
