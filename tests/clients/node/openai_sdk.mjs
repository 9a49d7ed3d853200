// openai-node: chat, stream helpers, the tool runner, and responses.
import OpenAI from 'openai'
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod'
import { z } from 'zod'
import { ADDRESS, MODEL, PATIENCE_MS, assert, main } from './checks.mjs'

const client = new OpenAI({ baseURL: `${ADDRESS}/v1`, apiKey: 'any', maxRetries: 0, timeout: PATIENCE_MS })
const messages = [{ role: 'user', content: 'Hello there, what is the weather?' }]
const model = MODEL
const Weather = z.object({ city: z.string(), sky: z.enum(['clear', 'cloudy']) })
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'], additionalProperties: false }
const tool = { type: 'function', function: { name: 'weather', description: 'Tells the weather', parameters } }

await main('openai', {
  async models() {
    const ids = []
    for await (const entry of client.models.list()) ids.push(entry.id)
    assert(ids.includes(model), ids)
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages })
    assert(answer.choices[0].message.content && answer.usage.total_tokens > 0, JSON.stringify(answer))
  },
  async chat_stream_helper() {
    const stream = client.chat.completions.stream({ model, messages, stream_options: { include_usage: true } })
    let text = ''
    stream.on('content', (delta) => (text += delta))
    const final = await stream.finalChatCompletion()
    assert(final.choices[0].message.content === text && text, text)
    assert((await stream.totalUsage()).completion_tokens > 0, 'usage')
  },
  async chat_parse_zod() {
    const answer = await client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(Weather, 'weather') })
    Weather.parse(answer.choices[0].message.parsed)
  },
  async chat_run_tools() {
    const seen = []
    const run = (args) => (seen.push(args), 'sunny')
    const tools = [{ type: 'function', function: { ...tool.function, function: run, parse: JSON.parse } }]
    const runner = client.chat.completions.runTools({ model, messages, tools, stream: true })
    assert(await runner.finalContent(), 'no content after the tool')
    assert(seen.length === 1 && typeof seen[0].city === 'string', JSON.stringify(seen))
  },
  async responses() {
    const answer = await client.responses.create({ model, input: 'Hello', store: false })
    assert(answer.status === 'completed' && answer.output_text, JSON.stringify(answer))
  },
  async responses_stream_helper() {
    const stream = client.responses.stream({ model, input: 'Hello', reasoning: { effort: 'low' } })
    const kinds = new Set()
    for await (const event of stream) kinds.add(event.type)
    const final = await stream.finalResponse()
    assert(kinds.has('response.reasoning_text.delta') && kinds.has('response.output_text.delta'), [...kinds])
    assert(final.output.map((item) => item.type).join() === 'reasoning,message', JSON.stringify(final.output))
  },
  async responses_tools_and_previous() {
    const tools = [{ type: 'function', name: 'weather', parameters, strict: true }]
    const first = await client.responses.create({ model, input: 'Hello', tools })
    const call = first.output.find((item) => item.type === 'function_call')
    const input = [{ type: 'function_call_output', call_id: call.call_id, output: 'sunny' }]
    const second = await client.responses.create({ model, input, tools, previous_response_id: first.id })
    assert(second.output_text, JSON.stringify(second))
  },
  async responses_parse_zod() {
    const answer = await client.responses.parse({ model, input: 'Hello', text: { format: zodTextFormat(Weather, 'weather') } })
    Weather.parse(answer.output_parsed)
  },
  async errors() {
    for (const fields of [{ model: 'none' }, { messages: [] }]) {
      const error = await client.chat.completions.create({ model, messages, ...fields }).catch((e) => e)
      assert(error instanceof OpenAI.APIError && [400, 404].includes(error.status) && error.code, error)
    }
  },
  async aborted() {
    const stream = await client.chat.completions.create({ model, messages, stream: true })
    for await (const _ of stream) break
    await client.chat.completions.create({ model, messages })
  },
})
