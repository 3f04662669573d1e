import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const url = process.argv[3], question = "What number is in picture 1?";
const content = [{ type: "image_url", image_url: { url } }, { type: "text", text: question }];
const asked = { model: "demo", messages: [{ role: "user", content }], temperature: 0, max_tokens: 8, reasoning_effort: "low" };
see((await client.chat.completions.create(asked)).choices[0].message.content);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) text += chunk.choices[0]?.delta.content ?? "";
see(text);
const input = [{ role: "user", content: [{ type: "input_image", image_url: url }, { type: "input_text", text: question }] }];
see((await client.responses.create({ model: "demo", input, temperature: 0, max_output_tokens: 8 })).output_text);
function see(text) { if (text.trim() !== '472') throw new Error(text); }
