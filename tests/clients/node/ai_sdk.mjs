// The AI SDK by each of its three providers that speak our APIs: chat completions, responses, messages.
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Output, generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'
import { ADDRESS, MODEL, assert, main } from './checks.mjs'

const prompt = 'Hello there, what is the weather?'
const Weather = z.object({ city: z.string(), sky: z.enum(['clear', 'cloudy']) })
const models = {
  compatible: createOpenAICompatible({
    name: 'edgelm', baseURL: `${ADDRESS}/v1`, apiKey: 'any', includeUsage: true, supportsStructuredOutputs: true,
  })(MODEL),
  chat: createOpenAI({ baseURL: `${ADDRESS}/v1`, apiKey: 'any' }).chat(MODEL),
  responses: createOpenAI({ baseURL: `${ADDRESS}/v1`, apiKey: 'any' }).responses(MODEL),
  messages: createAnthropic({ baseURL: `${ADDRESS}/v1`, apiKey: 'any' })(MODEL),
}
const thinking = {
  compatible: { edgelm: { reasoningEffort: 'low' } },
  responses: { openai: { forceReasoning: true, reasoningEffort: 'low', reasoningSummary: 'auto' } },
  messages: { anthropic: { thinking: { type: 'enabled', budgetTokens: 1024 } } },
}
const tools = (seen) => ({
  weather: tool({
    description: 'Tells the weather',
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => (seen.push(input), 'sunny'),
  }),
})
const failing = { maxRetries: 0, onError: () => {} }

async function streamed(options) {
  const result = streamText({ ...failing, ...options })
  for await (const part of result.fullStream) if (part.type === 'error') throw part.error
  return result
}

const checks = {}
for (const [name, model] of Object.entries(models)) {
  checks[`${name}_text`] = async () => {
    const result = await generateText({ model, prompt, maxRetries: 0 })
    assert(result.text && result.finishReason === 'stop', result.finishReason)
    assert(result.usage.inputTokens > 0 && result.usage.outputTokens > 0, JSON.stringify(result.usage))
  }
  checks[`${name}_stream`] = async () => {
    const result = await streamed({ model, prompt, system: 'Be brief.' })
    assert((await result.text) && (await result.finishReason) === 'stop', await result.finishReason)
    assert((await result.usage).outputTokens > 0, JSON.stringify(await result.usage))
  }
  checks[`${name}_tool_loop`] = async () => {
    for (const run of [generateText, streamed]) {
      const seen = []
      const result = await run({ model, prompt, tools: tools(seen), stopWhen: stepCountIs(3), maxRetries: 0 })
      assert(seen.length === 1 && typeof seen[0].city === 'string', JSON.stringify(seen))
      assert((await result.steps).length === 2 && (await result.text), 'steps')
    }
  }
  checks[`${name}_object`] = async () => {
    for (const run of [generateText, streamed]) {
      const result = await run({ model, prompt, output: Output.object({ schema: Weather }), maxRetries: 0 })
      Weather.parse(await result.output)
    }
  }
  if (name in thinking) {
    checks[`${name}_reasoning`] = async () => {
      for (const run of [generateText, streamed]) {
        const result = await run({ model, prompt, providerOptions: thinking[name], maxRetries: 0 })
        assert((await result.reasoningText) && (await result.text), JSON.stringify(await result.reasoning))
      }
    }
  }
  checks[`${name}_error`] = async () => {
    const image = [{ role: 'user', content: [{ type: 'image', image: new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10]) }] }]
    const error = await generateText({ model, messages: image, maxRetries: 0 }).catch((e) => e)
    assert(/reads no images/.test(error?.message), error?.message)
  }
}
await main('ai', checks)
