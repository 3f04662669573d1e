import Anthropic from "@anthropic-ai/sdk";
const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const source = { type: "base64", media_type: "image/png", data: process.argv[3].split(",")[1] };
const content = [{ type: "image", source }, { type: "text", text: "What number is in picture 1?" }];
const asked = { model: "demo", messages: [{ role: "user", content }], max_tokens: 8 };
see((await client.messages.create(asked)).content[0].text);
see((await client.messages.stream(asked).finalMessage()).content[0].text);
function see(text) { if (text.trim() !== '472') throw new Error(text); }
