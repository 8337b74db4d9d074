// The AI SDK over its providers for OpenAI's two APIs and Anthropic's, and the packages openai and ollama for JavaScript.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, Output, streamText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { z } from "zod";

const [base, model, embedder] = process.argv.slice(2);
const baseURL = `${base}/v1`;
const apiKey = "none";
const prompt = "What is the weather in Paris?";
const bound = { prompt, maxOutputTokens: 5, maxRetries: 0 };
const fleet = createOpenAICompatible({ name: "fleet", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });

const providers = [fleet.chatModel(model), createOpenAI({ baseURL, apiKey }).responses(model), createAnthropic({ baseURL, apiKey })(model)];
for (const one of providers) {
  const answer = await generateText({ model: one, ...bound });
  assert.ok(answer.text && answer.usage.outputTokens === 5, one.provider);
  assert.equal(answer.finishReason, "length", one.provider);
  const streamed = streamText({ model: one, ...bound });
  let text = "";
  for await (const part of streamed.textStream) text += part;
  assert.ok(text && (await streamed.usage).outputTokens === 5, one.provider);
}

const weather = tool({ description: "The weather of a city", inputSchema: z.object({ city: z.string() }) });
const forced = await generateText({ model: providers[0], prompt, tools: { weather }, toolChoice: "required", maxOutputTokens: 60 });
assert.equal(forced.toolCalls[0].toolName, "weather");
assert.equal(typeof forced.toolCalls[0].input.city, "string");
const schema = z.object({ city: z.string() });
const structured = await generateText({ model: providers[0], prompt, output: Output.object({ schema }), maxOutputTokens: 60 });
assert.equal(typeof structured.output.city, "string");
const { embeddings } = await embedMany({ model: fleet.textEmbeddingModel(embedder), values: ["a", "b"] });
assert.equal(embeddings.length, 2);
await assert.rejects(generateText({ model: fleet.chatModel("nothing"), prompt, maxRetries: 0 }), (error) => APICallError.isInstance(error) && error.statusCode === 404);

const messages = [{ role: "user", content: prompt }];
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
assert.ok((await client.models.list()).data.some((row) => row.id === model));
let usage;
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 5, stream: true, stream_options: { include_usage: true } })) usage = chunk.usage ?? usage;
assert.equal(usage.completion_tokens, 5);
await assert.rejects(client.chat.completions.create({ model: "nothing", messages }), OpenAI.NotFoundError);

const ollama = new Ollama({ host: base });
assert.ok((await ollama.list()).models.some((row) => row.name === `${model}:latest`));
let last;
for await (const part of await ollama.chat({ model, messages, stream: true, options: { num_predict: 5 } })) last = part;
assert.ok(last.done && last.eval_count === 5);
