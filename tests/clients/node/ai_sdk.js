import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
const model = createOpenAICompatible({ name: "local", baseURL: process.argv[2] + "/v1" })("demo");
const image = Buffer.from(process.argv[3].split(",")[1], "base64");
const content = [{ type: "image", image }, { type: "text", text: "What number is in picture 1?" }];
const options = { local: { reasoningEffort: "high" } };
const asked = { model, messages: [{ role: "user", content }], temperature: 0, maxRetries: 0, providerOptions: options };
see((await generateText(asked)).text);
see(await streamText(asked).text);
function see(text) { if (text.trim() !== '472') throw new Error(text); }
