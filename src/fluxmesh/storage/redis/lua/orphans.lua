-- uses: fleet, bereft
-- Jobs of dead owners. A[3] = limit. Answers as look_for_orphans.
return finish(look_for_orphans(A[3]))
