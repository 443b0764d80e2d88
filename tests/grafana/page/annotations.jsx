// Annotations: their queries, and how a graph marks them.
import { rangeUtil } from "@grafana/data";
import { useMemo } from "react";
import { queryRange } from "./prometheus.js";

const DEFAULT_STEP = "60s";

async function eventsOf(annotation, range, variables) {
  const step = rangeUtil.intervalToSeconds(annotation.step || DEFAULT_STEP);
  const scope = { interval: `${step}s`, intervalMs: step * 1000, rateInterval: `${4 * step}s` };
  const align = (time) => Math.ceil(time / 1000 / step) * step;
  const query = variables.replaceQuery(annotation.expr, scope);
  const { result } = await queryRange(query, align(range.from), align(range.to), step);
  const events = new Map();
  for (const { metric, values } of result) {
    for (const [seconds, value] of values) {
      const time = annotation.useValueForTime ? Math.floor(Number(value)) : seconds * 1000;
      events.set(JSON.stringify([metric, time]), {
        name: annotation.name,
        color: annotation.iconColor,
        time,
        metric,
      });
    }
  }
  return [...events.values()];
}

/** Return the events of every annotation of a board, and the errors of their queries. */
export async function readAnnotations(board, variables, range) {
  const errors = [];
  const shown = (board.annotations?.list ?? []).filter(
    ({ enable, hide, expr }) => enable && !hide && expr,
  );
  const lists = shown.map((annotation) =>
    eventsOf(annotation, range, variables).catch((error) => {
      errors.push(`annotation ${annotation.name}: ${error.message}`);
      return [];
    }),
  );
  return { events: (await Promise.all(lists)).flat(), errors };
}

function mark(u, x, color) {
  const bottom = u.bbox.top + u.bbox.height;
  u.ctx.strokeStyle = u.ctx.fillStyle = color;
  u.ctx.lineWidth = 1;
  u.ctx.setLineDash([5, 5]);
  u.ctx.stroke(new Path2D(`M ${x} ${u.bbox.top} V ${bottom}`));
  u.ctx.fill(new Path2D(`M ${x - 4} ${bottom + 5} h 8 l -4 -5 Z`));
}

/** Mark events in a graph: a dashed line, and a triangle below the axis. */
export function Annotations({ config, events, theme }) {
  useMemo(() => {
    config.addHook("draw", (u) => {
      u.ctx.save();
      for (const { time, color } of events) {
        const x = Math.round(u.valToPos(time, "x", true));
        const isInside = x >= u.bbox.left && x <= u.bbox.left + u.bbox.width;
        if (isInside) mark(u, x, theme.visualization.getColorByName(color));
      }
      u.ctx.restore();
    });
  }, [config]);
  return null;
}
