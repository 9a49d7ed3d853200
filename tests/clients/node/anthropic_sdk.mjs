// @anthropic-ai/sdk: messages, stream helper, and the tool runner.
import Anthropic from '@anthropic-ai/sdk'
import { ADDRESS, MODEL, PATIENCE_MS, assert, main } from './checks.mjs'

const client = new Anthropic({ baseURL: ADDRESS, apiKey: 'any', maxRetries: 0, timeout: PATIENCE_MS })
const model = MODEL
const messages = [{ role: 'user', content: 'Hello there, what is the weather?' }]
const input_schema = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }
const common = { model, max_tokens: 300, messages }

await main('@anthropic-ai/sdk', {
  async models() {
    const ids = []
    for await (const entry of client.models.list()) ids.push(entry.id)
    assert(ids.includes(model), ids)
  },
  async messages() {
    const answer = await client.messages.create(common)
    assert(answer.content[0].text && answer.stop_reason === 'end_turn', JSON.stringify(answer))
  },
  async stream_helper_with_thinking() {
    const stream = client.messages.stream({ ...common, max_tokens: 2000, thinking: { type: 'enabled', budget_tokens: 1024 } })
    let text = ''
    let thoughts = ''
    stream.on('text', (delta) => (text += delta)).on('thinking', (delta) => (thoughts += delta))
    const final = await stream.finalMessage()
    assert(thoughts && final.content[0].thinking === thoughts, 'thoughts')
    assert(text && final.content[1].text === text, 'text')
  },
  async tool_runner() {
    const seen = []
    const run = (input) => (seen.push(input), 'sunny')
    const tool = { type: 'custom', name: 'weather', description: 'Tells the weather', input_schema, run, parse: (x) => x }
    const final = await client.beta.messages.toolRunner({ ...common, tools: [tool], stream: false })
    assert(final.content[0].text, JSON.stringify(final))
    assert(seen.length === 1 && typeof seen[0].city === 'string', JSON.stringify(seen))
  },
  async count_tokens() {
    assert((await client.messages.countTokens({ model, messages })).input_tokens > 0, 'count')
  },
  async errors() {
    const error = await client.messages.create({ ...common, model: 'none' }).catch((e) => e)
    assert(error instanceof Anthropic.NotFoundError && error.error.error.type === 'not_found_error', error)
  },
})
