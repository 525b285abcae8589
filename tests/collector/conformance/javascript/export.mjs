// Exports COUNT spans in batches to the endpoint of the environment; prints what the exporter reported.
import { NodeTracerProvider, BatchSpanProcessor } from '@opentelemetry/sdk-trace-node';
import { OTLPTraceExporter } from '@opentelemetry/exporter-trace-otlp-http';
import { detectResources, envDetector } from '@opentelemetry/resources';
import { SpanKind } from '@opentelemetry/api';

const count = Number(process.env.COUNT);
const exporter = new OTLPTraceExporter();
const results = [];
const inner = exporter.export.bind(exporter);
exporter.export = (spans, done) => inner(spans, (result) => { results.push(result.code); done(result); });
const provider = new NodeTracerProvider({
  resource: detectResources({ detectors: [envDetector] }),
  spanProcessors: [new BatchSpanProcessor(exporter)],
});
const tracer = provider.getTracer('javascript', '1.0');
for (let n = 0; n < count; n++) {
  const span = tracer.startSpan(`chat ${n}`, { kind: SpanKind.CLIENT, attributes: {
    text: 'Zürich \u{1F642}', int: 7, double: 0.5, flag: true, list: [1, 2, 3],
  } });
  span.addEvent('event', { k: 'v' });
  span.end();
}
await provider.shutdown().catch(() => {}); // what it could not export, the results say
console.log(JSON.stringify(results));
